"""Numbers the package must reproduce, from computations that share no code with it.

- `rates()`: log b, log(D-1), log log D, log da/dt of the reduced flow at depths 0, 1,
  2, 3, 8, for vectors whose margins spread over 1e3 and whose norms run from 1e-12 to
  1e4; mpmath, 60 digits.
- `trajectories()`: P2 Fig. 1, P1 Fig. 10 and a fixed 15-vector at depths 2 and 3, to
  t = 1e10; Taylor series of order 40 in mpmath, 26 digits. This table and the one
  before lie in `oracles.json`, rounded to doubles.
- `kkt_points()`: all stationary points of min sum a^{2/(L+1)}, Psi a >= 1, for K = 4
  and 8, one of each orbit, isolated ones; by supports and active sets, Newton with 40
  digits, and linear programs. In `oracles.json` as well.
- `DNC_RAY`: log t at given height on the ray a = mu·1; mpmath, 50 digits.
- `P2_COUNTEREXAMPLES`: mpmath, 60 digits, at exactly the doubles given.
- `FULL_FLOW`: the matrix flow against the reduced one; NumPy and SciPy, DOP853 at 1e-13
  (agreeing to 4.5e-13), the reduced flow in mpmath.
"""

import json
import math
import pathlib
from typing import Any

import mpmath as mp
import numpy as np

_TABLES = json.loads((pathlib.Path(__file__).parent / "oracles.json").read_text())


def rates() -> list[dict[str, Any]]:
    return _TABLES["rates"]


def kkt_points() -> list[dict[str, Any]]:
    return _TABLES["kkt_points"]


def trajectories() -> list[dict[str, Any]]:
    return _TABLES["trajectories"]


# K, L, mu, log t(mu) and log(dmu/dlog t) there, from ‖a‖_1 = DNC_START at t = 0. The
# times are about 1e3, 1e10, 1e100, 1e300, 10^(10^4) and 10^(10^6).
DNC_START = 0.001
DNC_RAY = [
    (4, 1, 2.630957, 6.907757016963485192548887, -1.2625096245334779663),
    (4, 1, 6.923774, 23.02585096235060822131654, -1.3479896798434831836),
    (4, 1, 174.6774, 690.7755047286960218095205, -1.3848600660374961381),
    (4, 1, 5759.321, 23025.85287982368450685407, -1.3862509503983833139),
    (4, 1, 575650.3, 2302585.164156074986531022, -1.3862939268281637501),
    (8, 2, 3.605689, 23.02585407001070585677096, -2.0301992204251066754),
    (8, 2, 29.8676, 230.2585041717957722678876, -2.0738219120917156649),
    (8, 2, 87.61205, 690.7755323924509781639852, -2.0775346717893386704),
    (8, 2, 287825.8, 2302585.480969875595309579, -2.0794409626254658785),
    (16, 3, 0.7200952, 6.907755488978846204352928, -2.3338854738278362048),
    (16, 3, 1.839425, 23.02584519425705305630649, -2.7181865493317555598),
    (16, 3, 43.87441, 690.7755278366889208819223, -2.7704465894680070488),
    (16, 3, 1440.144, 23025.85014007676655060516, -2.7725236196381860438),
    (16, 3, 143913.0, 2302584.639376862992304721, -2.7725880708040440157),
    (16, 8, 1.850017, 23.02585448592349593973913, -2.7081490971949013826),
    (16, 8, 15.03844, 230.2584483980862395421573, -2.7651413868067830360),
    (16, 8, 43.9402, 690.7755276396422449867237, -2.7700532050379980212),
    (16, 8, 143913.2, 2302584.540217782823353602, -2.7725879501688227819),
]

# P2 D.2 (K = 8): M of P2 eq. 12 rises, printed as 7.3e-4. P2 B.3.3 (K = 16): so does
# log(a_1/a_2), printed as 1.8e-13, the difference of two rates near one percent of it.
P2_RISING_DISTANCE = [1.0, 1.0, 1.0, 1.25, 0.01, 0.01, 0.01]
P2_DISTANCE_RATE = 7.330787094099465721615139e-4
P2_LOG_RATIO = [5.01, 0.99, 2, 5, 1, 5, 1, 2, 1, 5, 3, 5, 1, 5, 1.0]
P2_LOG_RATIO_RATE = 1.824999973963138428853814e-13

# K = 4, n = 3, d = 6, L = 2 from singular values (1.5, 1, 0.5) of the logit matrix:
# t, t', the reduced flow's a' at t', the singular values of the logit matrix at t.
FULL_FLOW_START = [1.5, 1.0, 0.5]
A_PRIME_OVER_A = 0.14433756729740644113
T_PRIME_OVER_T = 9.9057817466838800516
FULL_FLOW = [
    (
        0.25,
        2.4764454366709700129,
        [0.62616244622752007873, 0.42754331264542062628, 0.18440615467231267961],
        [4.338180682630949, 2.9621069597527336, 1.2776033164834417],
    ),
    (
        2.0,
        19.811563493367760103,
        [1.9172221405121844795, 1.7898848813627926864, 0.78396844343889287932],
        [13.282904627056768, 12.400686216884518, 5.431492702269816],
    ),
    (
        50.0,
        495.28908733419400258,
        [3.1348422081725492782, 3.1106111778751173922, 1.6650140251883176449],
        [21.718823913065684, 21.55094641068609, 11.535555547763078],
    ),
]


def dnc_log_norm(num_classes: int, mu: float) -> float:
    """log ‖a‖_1 of mu·1."""
    return math.log(mu) + math.log(num_classes - 1)


def mp_log_rates(a, depth: float) -> np.ndarray:
    """log(d log a_i/dt) of P1 eq. 6 in 40 digits, with Psi read off digit parities."""
    with mp.workdps(40):
        exact = [mp.mpf(float(x)) for x in a]
        power = mp.mpf(1) if math.isinf(depth) else (mp.mpf(depth) - 1) / (depth + 1)
        indices = range(len(exact))

        def psi(v):
            return [
                2
                * mp.fsum(v[j] for j in indices if ((i + 1) & (j + 1)).bit_count() % 2)
                for i in indices
            ]

        weights = [mp.e ** (-m) for m in psi(exact)]
        log_d = mp.log(1 + mp.fsum(weights))
        return np.array(
            [
                float(mp.log(b) - log_d + power * mp.log(x))
                for b, x in zip(psi(weights), exact)
            ]
        )
