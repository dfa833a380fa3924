"""Which sizes share one compiled program, padded to the largest among them.

Padding costs time in every step, a compilation once. The sizes along an axis are
divided where the two together are least: a grid of a few members runs in one program,
one of thousands, or of very different widths, in several.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

# What one more program costs, and a member of depth L and width d that is padded along
# them, in seconds on one core (benchmarks/bench_full_ensemble.py: 0.1 s at L = 10,
# d = 100). Only their ratio matters.
COMPILATION = 8.0


def member_seconds(depth: float, width: float) -> float:
    """Returns about how long a member of the full flow takes."""
    return 1e-6 * (depth + 1) * width**2


def bucket_edges(
    sizes: Sequence[int], seconds: Callable[[int, int], float]
) -> tuple[int, ...]:
    """Returns the sizes to pad to, ascending: each size belongs to the next edge.

    **Arguments:** `sizes` along an axis; `seconds(size, edge)` what all members of one
    size take when they are padded to `edge`.
    """
    ordered = sorted(sizes)
    # best[i]: least cost of the first i sizes, and the edges that it takes.
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for i, edge in enumerate(ordered, start=1):
        costs = list(accumulate(seconds(size, edge) for size in reversed(ordered[:i])))
        choices = [
            (best[i - 1 - j][0] + cost + COMPILATION, (*best[i - 1 - j][1], edge))
            for j, cost in enumerate(costs)
        ]
        best.append(min(choices))
    return best[-1][1]


def edge_above(edges: Sequence[int], size: int) -> int:
    """Returns what a size is padded to."""
    return min(edge for edge in edges if edge >= size)
