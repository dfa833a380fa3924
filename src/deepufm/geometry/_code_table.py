"""The least largest inner products known of K unit vectors in R^r, K <= 32, r <= 8.

Exact, by theorems, for r = 2, cos(2 pi/K); for K <= r+1, -1/(K-1); for r+1 < K <= 2r, 0
(Rankin, 1955). The rest was computed here by the steps of `softmax_code`, from 24 or
more starts a case: random ones, the best codes of one vector more or fewer, and the
best code with a few vectors placed anew; the more, the rarer the best was hit. These
are upper bounds on the least rho, reached by codes, not proofs: for r = 3 they are the
published ones for Tammes' problem, for large K and r better codes may well exist. They
are proved to be least, as far as we know, for r = 3 with K <= 14 and K = 24 (Fejes
Toth, Schuette & van der Waerden, Danzer, Musin & Tarasov, Robinson) and for (K, r) =
(10, 4), (24, 4), (16, 5), (27, 6).
"""

import math

# By rank, for K = 2r+1, ..., 32.
# fmt: off
_FOUND = {
    3: (
        0.2101383127306, 0.2612038749637, 0.3333333333333, 0.4043943252163,
        0.4472135955000, 0.4472135955000, 0.5426364868296, 0.5639503003605,
        0.5926059029251, 0.6122946164827, 0.6280944150700, 0.6486958322231,
        0.6731168875601, 0.6764771381297, 0.6994984310664, 0.7103062585797,
        0.7228469848684, 0.7230784683335, 0.7473986285780, 0.7542781771200,
        0.7583892107766, 0.7732302623380, 0.7802814159487, 0.7815518750950,
        0.7911186132987, 0.7936166148713,
    ),
    4: (
        0.1620151996116, 0.1666666666667, 0.2304055635946, 0.2500000000000,
        0.3072956539810, 0.3195185942126, 0.3509921759453, 0.3876281771225,
        0.4122593626933, 0.4228194140731, 0.4342585459107, 0.4342585459107,
        0.4713808585073, 0.4980085354045, 0.5000000000000, 0.5000000000000,
        0.5373160566551, 0.5407896176975, 0.5575913511802, 0.5673675222312,
        0.5731485304484, 0.5842328139306, 0.5907658385807, 0.5957201492355,
    ),
    5: (
        0.1328535425986, 0.1539316050330, 0.1877868296160, 0.2000000000000,
        0.2000000000000, 0.2000000000000, 0.2704758352686, 0.2755017416598,
        0.2918223990256, 0.2993856928991, 0.3149169571753, 0.3549950341663,
        0.3705001640780, 0.3742329824652, 0.3796210253938, 0.3902859716071,
        0.4016677513104, 0.4081696990929, 0.4110344350927, 0.4130297761221,
        0.4339118639601, 0.4418503906606,
    ),
    6: (
        0.1130797521474, 0.1324909203235, 0.1449489742783, 0.1711476494294,
        0.1832743370231, 0.1981368122494, 0.2002260258912, 0.2142857142857,
        0.2428528480137, 0.2488657126712, 0.2500000000000, 0.2500000000000,
        0.2500000000000, 0.2500000000000, 0.2500000000000, 0.3000000000000,
        0.3278448308812, 0.3333019399581, 0.3333333333333, 0.3333333333333,
    ),
    7: (
        0.0987017762724, 0.1133208796001, 0.1248415838175, 0.1261319836229,
        0.1565973854171, 0.1705715722144, 0.1824042257593, 0.1827439976316,
        0.1827439976316, 0.1827439976323, 0.2147372338546, 0.2313314303714,
        0.2405493820092, 0.2475586468968, 0.2491542139237, 0.2496052114084,
        0.2545041082755, 0.2659186639341,
    ),
    8: (
        0.0877334633233, 0.0994695727119, 0.1114099750260, 0.1194968666872,
        0.1306019374819, 0.1306019374819, 0.1572709770937, 0.1576921449394,
        0.1643341741250, 0.1726520950351, 0.1798564570592, 0.1811584200215,
        0.1879224900770, 0.2041631793104, 0.2220556506369, 0.2289526801276,
    ),
}
# fmt: on


def best_known_inner_product(num_classes: int, rank: int) -> float:
    """Returns the least known max_{i<j} x_i·x_j of K unit vectors in R^r.

    **Arguments:** `num_classes` K, 2 or more; `rank` r, 2 or more.

    **Returns:** rho, right to 1e-12; NaN where no search was made, that is for K > 2r
    with r > 2 where K > 32 or r > 8.

    **Raises:** `ValueError` for fewer classes or a lower rank.
    """
    for name, value in (("num_classes", num_classes), ("rank", rank)):
        if value < 2:
            raise ValueError(f"Argument `{name}` must be 2 or more, but is {value}.")
    if num_classes <= rank + 1:
        return -1 / (num_classes - 1)
    if num_classes <= 2 * rank:
        return 0.0
    if rank == 2:
        return math.cos(2 * math.pi / num_classes)
    found = _FOUND.get(rank, ())
    place = num_classes - 2 * rank - 1
    return found[place] if place < len(found) else math.nan
