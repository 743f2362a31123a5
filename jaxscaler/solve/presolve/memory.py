"""Memory rows: what every strategy takes goes into the capacities, rows that cannot bind go."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numba import njit

from jaxscaler.solve.kernel import Kernel, NoSolution, keep_entries, row_sums


def tidy_memory(kernel: Kernel) -> Kernel:
    """Fewer rows and entries, same choices feasible.

    A node's entries become disjoint; each loses its least usage to the capacities; rows that can
    never overflow, or whose neighbour holds all of their entries with no more room, are dropped.
    """
    kernel = _reduce(_disjoint(kernel))
    if (kernel.caps < 0).any():
        raise NoSolution("the least possible memory is above the limit")
    return _drop_rows(kernel)


def affordable(kernel: Kernel) -> np.ndarray:
    """Mask [S] of the strategies that fit while all other nodes take their least (when tidied)."""
    alive = np.ones(kernel.node_ptr[-1], bool)
    if len(kernel.use_node):
        room = _least_over(kernel.caps, kernel.use_lo, kernel.use_hi)
        size = np.diff(kernel.use_ptr)
        first = kernel.node_ptr[:-1][kernel.use_node] - kernel.use_ptr[:-1]
        at = np.arange(len(kernel.usages)) + np.repeat(first, size)
        alive[at[kernel.usages > np.repeat(room, size)]] = False
    return alive


def _least_over(values: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """min(values[lo:hi]) for every interval (none empty), by doubling."""
    level = np.frexp(hi - lo)[1] - 1  # floor(log2(length))
    least = np.empty(len(lo), np.int64)
    table = values
    for power in range(int(level.max(initial=0)) + 1):
        mine = level == power
        least[mine] = np.minimum(table[lo[mine]], table[hi[mine] - 2**power])
        table = np.minimum(table[: -(2**power)], table[2**power :])
    return least


def _reduce(kernel: Kernel) -> Kernel:
    """Take each entry's least usage off the capacities; entries left with nothing go."""
    if not len(kernel.use_node):
        return kernel
    least = np.minimum.reduceat(kernel.usages, kernel.use_ptr[:-1])
    most = np.maximum.reduceat(kernel.usages, kernel.use_ptr[:-1])
    caps = kernel.caps - row_sums(kernel.use_lo, kernel.use_hi, least, len(kernel.caps))
    usages = kernel.usages - np.repeat(least, np.diff(kernel.use_ptr))
    kernel = replace(kernel, caps=caps, usages=usages)
    return keep_entries(kernel, np.flatnonzero(most > least))


def _disjoint(kernel: Kernel) -> Kernel:
    """Sum entries of one node where they overlap, join its neighbouring equal entries."""
    order = np.argsort(kernel.use_node, kind="stable")
    counts = np.bincount(kernel.use_node, minlength=kernel.num_nodes)
    ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    sizes = kernel.sizes
    room = int((np.maximum(2 * counts - 1, 0) * sizes).sum())
    node, lo, hi, usages = _segments(
        ptr, order, kernel.use_lo, kernel.use_hi, kernel.use_ptr, kernel.usages, sizes,
        int(np.maximum(2 * counts - 1, 0).sum()), room,
    )  # fmt: skip
    use_ptr = np.concatenate([[0], np.cumsum(sizes[node])]).astype(np.int64)
    return replace(kernel, use_node=node, use_lo=lo, use_hi=hi, use_ptr=use_ptr, usages=usages)


@njit(cache=True)
def _segments(ptr, entries, use_lo, use_hi, use_ptr, usages, sizes, most, room):
    node, lo, hi = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    out = np.empty(room, np.int64)
    found, filled = 0, 0
    for i in range(len(ptr) - 1):
        first, count, k = ptr[i], ptr[i + 1] - ptr[i], sizes[i]
        if count == 0:
            continue
        times = np.empty(2 * count, np.int64)
        for n in range(count):
            u = entries[first + n]
            times[n], times[count + n] = use_lo[u], use_hi[u]
        order = np.argsort(times)
        level, open_entries = np.zeros(k, np.int64), 0
        opened = found  # the node's first segment
        for n in range(2 * count):
            which = order[n]
            u = entries[first + which % count]
            sign = 1 if which < count else -1
            open_entries += sign
            for s in range(k):
                level[s] += sign * usages[use_ptr[u] + s]
            now = times[which]
            if open_entries == 0 or n + 1 == 2 * count or times[order[n + 1]] == now:
                continue
            until = times[order[n + 1]]
            same = found > opened and hi[found - 1] == now
            if same:
                for s in range(k):
                    if out[filled - k + s] != level[s]:
                        same = False
                        break
            if same:
                hi[found - 1] = until
            else:
                node[found], lo[found], hi[found] = i, now, until
                out[filled : filled + k] = level
                found += 1
                filled += k
    return node[:found].copy(), lo[:found].copy(), hi[:found].copy(), out[:filled].copy()


def _drop_rows(kernel: Kernel) -> Kernel:
    rows = len(kernel.caps)
    most = (
        np.maximum.reduceat(kernel.usages, kernel.use_ptr[:-1])
        if len(kernel.use_node)
        else np.zeros(0, np.int64)
    )
    binding = row_sums(kernel.use_lo, kernel.use_hi, most, rows) > kernel.caps
    kernel = _select_rows(kernel, binding)
    rows = len(kernel.caps)
    starts = np.bincount(kernel.use_lo, minlength=rows + 1)
    ends = np.bincount(kernel.use_hi, minlength=rows + 1)
    return _select_rows(kernel, _maximal(kernel.caps, starts, ends))


def _select_rows(kernel: Kernel, keep: np.ndarray) -> Kernel:
    if keep.all():
        return kernel
    below = np.concatenate([[0], np.cumsum(keep)]).astype(np.int64)
    kernel = replace(
        kernel,
        caps=kernel.caps[keep],
        row_names=kernel.row_names[keep],
        use_lo=below[kernel.use_lo],
        use_hi=below[kernel.use_hi],
    )
    return keep_entries(kernel, np.flatnonzero(kernel.use_lo < kernel.use_hi))


@njit(cache=True)
def _maximal(caps, starts, ends):
    """Rows that no neighbour dominates (neighbours among what is left).

    starts[r], ends[r]: entries that begin, end at the boundary before row r. A row goes when
    nothing of it ends before the next kept row, which has no more room; and mirrored.
    """
    keep = np.ones(len(caps), np.bool_)
    stack = np.empty(len(caps), np.int64)
    begun, ended = np.empty(len(caps), np.int64), np.empty(len(caps), np.int64)
    height = 0  # boundary n: between stack[n - 1] and stack[n]
    for r in range(len(caps)):
        s, e = starts[r], ends[r]
        swallowed = False
        while height:
            above = stack[height - 1]
            if e == 0 and caps[r] <= caps[above]:
                keep[above] = False
                height -= 1
                s, e = s + begun[height], e + ended[height]
            else:
                swallowed = s == 0 and caps[above] <= caps[r]
                break
        if swallowed:
            keep[r] = False
            if r + 1 < len(caps):
                starts[r + 1] += s
                ends[r + 1] += e
        else:
            stack[height], begun[height], ended[height] = r, s, e
            height += 1
    return keep
