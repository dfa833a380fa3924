"""Invariant rays without the package: tables, brute force, and 50 digits.

The tables were computed with mpmath, by central differences of the exact vector field
in 60 digits (thresholds: bisection); rows agree with closed forms to all digits shown.
"""

import mpmath as mp
import numpy as np

# Simplex ETF: (L, exponents at mu = 0.001, 0.1, 0.5, 1, 3), the same for K = 4, 8, 16.
DNC_MU = [0.001, 0.1, 0.5, 1.0, 3.0]
DNC_EXPONENTS = [
    (1, [-0.001, -0.1, -0.5, -1.0, -3.0]),
    (2, [0.33233333333333333, 0.23333333333333333, -0.16666666666666667,
         -0.66666666666666667, -2.6666666666666667]),
    (3, [0.499, 0.4, 0.0, -0.5, -2.5]),
    (8, [0.77677777777777778, 0.67777777777777778, 0.27777777777777778,
         -0.22222222222222222, -2.2222222222222222]),
]  # fmt: skip

# The odd modes: (K, L, exponents within the support at these mu).
C_MU = [0.05, 0.3, 0.8, 2.0]
C_WITHIN = [
    (4, 1, [-0.052497918747893998610, -0.38739378373547727175,
            -1.3312294162142791709, -3.9280551601516337679]),
    (4, 1.5, [0.14750208125210600139, -0.18739378373547727175,
              -1.1312294162142791709, -3.7280551601516337679]),
    (4, 100, [0.92770010105408619941, 0.59280423606650292627,
              -0.35103139641229897293, -2.9478571403496535699]),
    (8, 1, [-0.052373422723975906125, -0.36350481764140296537,
            -1.0523677240572432138, -2.6663685110041140175]),
    (8, 1.5, [0.14762657727602409387, -0.16350481764140296537,
              -0.85236772405724321378, -2.4663685110041140175]),
    (8, 100, [0.92782459707800429189, 0.61669320216057723265,
              -0.072169704255263015764, -1.6861704912021338194]),
    (16, 1, [-0.052149062568352371965, -0.33847066204158217466,
             -0.91406874606097163063, -2.2857142489681068049]),
    (16, 1.5, [0.14785093743164762803, -0.13847066204158217466,
               -0.71406874606097163063, -2.0857142489681068049]),
    (16, 100, [0.92804895723362782605, 0.64172735776039802336,
               0.066129273741008567392, -1.3055162291661266068]),
]  # fmt: skip
# K = 32 at mu = 0.3 only.
C_WITHIN_32 = [
    (1, -0.31982452833544847469),
    (1.5, -0.11982452833544847469),
    (100, 0.66037349146653172333),
]
# Even modes of 1e-40 beside the odd ones at L = 1: (K, exponents at C_MU).
C_TRANSVERSE = [
    (4, [0.04995837495788, 0.291312612451591, 0.664036770267849, 0.964027580075817]),
    (8, [0.0474684544795181, 0.211682725471343, 0.315459655071554, 0.333184255502057]),
    (16, [0.0429812513670474, 0.128235540138607, 0.142585932576215, 0.142857124484053]),
]
C_DEPTHS = [1.5, 2.0, 3.0, 5.0, 10.0, 100.0]
# ‖a‖_1 from which c is stable, at these depths.
C_THRESHOLDS = {
    4: [0.3420609780730212091666390, 0.5296112735015073445735430,
        0.7388350311316077823935206, 0.9297644412620164759071663,
        1.092563703920207126803654, 1.258619288945986460761534],
    8: [0.6993787778812320981319716, 1.109867539203047268932494,
        1.600861345141667756749106, 2.083034460653072570981984,
        2.520352819657568310290173, 2.989891074702921979183211],
    16: [1.447052538959754342797114, 2.364660403545269630112789,
         3.514875749678900755168801, 4.672896772983093964343413,
         5.729929613828989838682548, 6.862411805279834535886996],
    32: [3.009859718788381017437789, 5.002240954823400951986465,
         7.500276465741201289764783, 10.00003026570381496712606,
         12.27273109983273185652947, 14.70297070057731149651940],
}  # fmt: skip


def psi(num_classes):
    """2 where the numbers i and j share an odd number of binary digits."""
    numbers = range(1, num_classes)
    return np.array([[2 * ((i & j).bit_count() % 2) for j in numbers] for i in numbers])


def direction(num_classes, modes):
    return np.isin(np.arange(1, num_classes), modes).astype(float)


def brute_rates(num_classes, modes, mu):
    """The eigenvalues of mu·G but for that of the ray, rising, from all K-1 margins."""
    alive = np.array(modes) - 1
    matrix = psi(num_classes)[alive]
    margins = np.sum(matrix, axis=0)
    decay = np.where(
        margins > 0, np.exp(-mu * (margins - np.min(margins[margins > 0]))), 0
    )
    jacobian = mu * (matrix * decay) @ matrix.T / (matrix @ decay)[0]
    # The ray's eigenvalue out of the way, above all others.
    lifted = jacobian + np.max(np.abs(jacobian)) * np.ones_like(jacobian)
    return np.linalg.eigvalsh(lifted)[:-1]


def log_norm_field(log_a, power):
    """d log a_i/d log N in mpmath: the exact vector field, whatever `mp.dps` is."""
    numbers = range(1, len(log_a) + 1)
    a = [mp.e**x for x in log_a]
    margins = [
        2 * mp.fsum(a[j - 1] for j in numbers if (i & j).bit_count() % 2)
        for i in numbers
    ]
    weights = [mp.e ** (-m) for m in margins]
    rates = [
        mp.fsum(weights[j - 1] for j in numbers if (i & j).bit_count() % 2)
        * a[i - 1] ** power
        for i in numbers
    ]
    growth = mp.fsum(x * f for x, f in zip(a, rates)) / mp.fsum(a)
    return [f / growth for f in rates]


def difference_exponents(num_classes, modes, mu, depth):
    """Exponents within the support, rising, from central differences in 50 digits.

    d log N/ds = 1 on any orbit, so that the Jacobian has one eigenvalue 0, the ray's.
    """
    with mp.workdps(50):
        power = (mp.mpf(depth) - 1) / (mp.mpf(depth) + 1)
        step = mp.mpf(10) ** -16
        alive = np.array(modes) - 1
        start = [mp.mpf(-200)] * (num_classes - 1)
        for i in alive:
            start[i] = mp.log(mp.mpf(mu))
        columns = []
        for i in alive:
            up, down = list(start), list(start)
            up[i] += step
            down[i] -= step
            above, below = log_norm_field(up, power), log_norm_field(down, power)
            columns.append([(above[j] - below[j]) / (2 * step) for j in alive])
        jacobian = np.array(columns, float).T
    values = np.linalg.eigvals(jacobian)
    assert np.max(np.abs(values.imag)) < 1e-12
    values = values.real
    ray = np.argmin(np.abs(values))
    assert abs(values[ray]) < 1e-13
    return np.sort(np.delete(values, ray))
