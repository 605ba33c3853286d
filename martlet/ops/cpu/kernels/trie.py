"""Walks a vocabulary's trie along an automaton, and writes masks (definition: `grammar/walk.py`).

    trie, nodes in depth-first order          DFA                  out
    byte  [N]    the byte into a node         table  [states, 256] tokens that stay inside
    end   [N]    the node after its subtree   accept [states]      tokens that leave it
    depth [N]    bytes above and in it        follow [256]         the same that stay as bits
    first [N+1]  tokens of nodes before it

A token that stays has its characters; a token that leaves, offset, label and characters.

Bound by the trie's nodes that the automaton lets through: about 4 ns each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from martlet.ops.cpu.kernels.fields import MASK_FILL, TRIE_WALK

if TYPE_CHECKING:  # simd.py needs Numba, and who only names these fields does not
    from martlet.ops.cpu.simd.verbs import Verbs

BYTE, END, DEPTH, FIRST, TOKENS, TABLE, ACCEPT, FOLLOW, *_ = TRIE_WALK
*_, START, NODE, COUNTED, SCRATCH, MASK, STAYING, LEAVING, N_FOUND, FINAL = TRIE_WALK
OUT, N_WORDS, SHARED, IDS, N_IDS = MASK_FILL


def mask_fill_kernel(v: Verbs) -> Callable[..., None]:
    """OUT = the mask SHARED (0: empty) joined with the tokens IDS; bound by writing 19 KB."""

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        out, ids, shared = v.i32p(record[OUT]), v.i32p(record[IDS]), v.i32p(record[SHARED])
        if record[SHARED] == 0:
            for i in range(record[N_WORDS]):
                out[i] = 0
        else:
            for i in range(record[N_WORDS]):
                out[i] = shared[i]
        for i in range(record[N_IDS]):
            token = ids[i]
            out[token >> 5] = out[token >> 5] | (1 << (token & 31))

    return kernel


def trie_walk_kernel(v: Verbs) -> Callable[..., None]:
    """From NODE, where the automaton is in state START, through all of its subtree.

    A character begins with each byte that leads from state COUNTED on; what closes a string leads
    to a state that accepts and is not counted. SCRATCH has two int32 a depth.
    """

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        byte, end, depth = v.i8p(record[BYTE]), v.i32p(record[END]), v.i32p(record[DEPTH])
        first, tokens = v.i32p(record[FIRST]), v.i32p(record[TOKENS])
        table, accept, follow = v.i32p(record[TABLE]), v.i32p(record[ACCEPT]), v.i8p(record[FOLLOW])
        final = v.i8p(record[FINAL])
        scratch, mask = v.i32p(record[SCRATCH]), v.i32p(record[MASK])
        staying, leaving, n_found = v.i32p(record[STAYING]), v.i32p(record[LEAVING]), v.i64p(record[N_FOUND])
        counted, node, n_staying, n_leaving = record[COUNTED], record[NODE], 0, 0
        at = depth[node]
        scratch[2 * at] = record[START]
        scratch[2 * at + 1] = 0
        i, stop = node + 1, end[node]
        while i < stop:
            at = depth[i]
            before, count = scratch[2 * at - 2], scratch[2 * at - 1]
            b = byte[i] & 255
            state = table[before * 256 + b]
            if state == 0:
                if accept[before] != 0 and follow[b] != 0:
                    for k in range(first[i], first[end[i]]):
                        leaving[4 * n_leaving] = tokens[k]
                        leaving[4 * n_leaving + 1] = at - 1
                        leaving[4 * n_leaving + 2] = accept[before]
                        leaving[4 * n_leaving + 3] = count
                        n_leaving += 1
                i = end[i]
                continue
            if before == counted and accept[state] == 0:
                count += 1
            scratch[2 * at] = state
            scratch[2 * at + 1] = count
            if final[state] != 0:
                for k in range(first[i], first[i + 1]):
                    leaving[4 * n_leaving] = tokens[k]
                    leaving[4 * n_leaving + 1] = at
                    leaving[4 * n_leaving + 2] = accept[state]
                    leaving[4 * n_leaving + 3] = count
                    n_leaving += 1
                i += 1
                continue
            for k in range(first[i], first[i + 1]):
                token = tokens[k]
                mask[token >> 5] = mask[token >> 5] | (1 << (token & 31))
                staying[2 * n_staying] = token
                staying[2 * n_staying + 1] = count
                n_staying += 1
            i += 1
        n_found[0] = n_staying
        n_found[1] = n_leaving

    return kernel
