"""The walk of a trie along an automaton: compiled, or in Python, which defines it.

The walk visits the nodes below a trie node that the automaton lets through. A token *stays* if the
automaton takes all its bytes. It *leaves* where the automaton accepts, does not go on with the next
byte, and that byte may follow the lexeme; or where it ends in a state that nothing leaves. Read
`ops/cpu/kernels/trie.py` next.
"""

import ctypes
import threading
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from martlet.grammar.states import Lexeme
from martlet.ops.cpu.kernels import trie
from martlet.ops.cpu.kernels.fields import RECORD_FIELDS

MOST_LISTED = 512  # more tokens are a mask, fewer a list
I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
Walk = tuple[I32, I32, U32 | None]  # staying [n, 2], leaving [m, 4], mask of the tokens that stay


def address(array: NDArray[Any]) -> int:
    """The address of an array's data [...], which must be writable; 0 if empty.

    Several times quicker than numpy's.
    """
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data)) if array.size else 0


class _Record(threading.local):
    """A record for each thread, since several may write the same mask."""

    def __init__(self) -> None:
        self.record = np.zeros(RECORD_FIELDS, np.int64)
        self.address = address(self.record)


class Fill(NamedTuple):
    """A mask as the kernel takes it: a record, and its arrays uint32 [words] and int32 [n]."""

    record: NDArray[np.int64]
    shared: U32 | None
    ids: I32


class Walker:
    """Walks one trie; its buffers serve one walk at a time."""

    def __init__(
        self, byte: NDArray[np.uint8], end: I32, depth: I32, first: I32, tokens: I32, n_words: int, kernels: Any
    ) -> None:
        self._byte, self._end, self._depth, self._first, self._tokens = byte, end, depth, first, tokens
        n = len(tokens)
        self._scratch = np.zeros(2 * (int(depth.max(initial=0)) + 2), np.int32)
        self._mask = np.zeros(n_words, np.uint32)
        self._staying = np.zeros((n + 1, 2), np.int32)
        self._leaving = np.zeros((n + 1, 4), np.int32)
        self._n_found = np.zeros(2, np.int64)
        self._follow: dict[frozenset[int], NDArray[np.uint8]] = {}
        self._lock = threading.Lock()
        self._own = _Record()
        self._unused = np.zeros(4, np.int64)  # what compiled code returns, which is nothing
        self._unused_address = address(self._unused)
        self._kernels = kernels  # it owns the code
        self._fill = None if kernels is None else kernels.function("mask_fill")
        self._kernel = None if kernels is None else kernels.function("trie_walk")
        self._record = np.zeros(RECORD_FIELDS, np.int64)
        for field, array in (
            (trie.BYTE, byte),
            (trie.END, end),
            (trie.DEPTH, depth),
            (trie.FIRST, first),
            (trie.TOKENS, tokens),
            (trie.SCRATCH, self._scratch),
            (trie.MASK, self._mask),
            (trie.STAYING, self._staying),
            (trie.LEAVING, self._leaving),
            (trie.N_FOUND, self._n_found),
        ):
            self._record[field] = array.ctypes.data

    def walk(self, lexeme: Lexeme, state: int, node: int) -> Walk:
        """What the tokens below `node` do from a lexeme's `state` on.

        Returns int32 [n, 2] of (token, characters) that stay, int32 [m, 4] of (token, offset,
        label, characters) that leave, and uint32 [words] of the tokens that stay if they are many.
        The list is empty then, unless their characters are counted.
        """
        with self._lock:
            self._mask.fill(0)
            if self._kernel is None:
                self._walk_reference(lexeme, state, node)
            else:
                record = self._record
                record[trie.TABLE] = lexeme.dfa.table.ctypes.data
                record[trie.ACCEPT] = lexeme.dfa.accept.ctypes.data
                record[trie.FINAL] = lexeme.dfa.final.ctypes.data
                record[trie.FOLLOW] = self._follow_bytes(lexeme.follow).ctypes.data
                record[trie.START], record[trie.NODE], record[trie.COUNTED] = state, node, lexeme.counted
                unused = self._unused_address
                self._kernel(unused, unused, record.ctypes.data, unused, 0, 1)
            n_staying, n_leaving = self._n_found.tolist()
            mask = self._mask.copy() if n_staying > MOST_LISTED else None
            if mask is not None and not lexeme.counted:
                n_staying = 0
            return self._staying[:n_staying].copy(), self._leaving[:n_leaving].copy(), mask

    def prepared(self, shared: U32 | None, ids: I32) -> Fill:
        """A mask to be written often: `shared` uint32 [words] or None, and `ids` int32 [n]."""
        record = np.zeros(RECORD_FIELDS, np.int64)
        record[trie.N_WORDS] = len(self._mask)
        record[trie.SHARED] = 0 if shared is None else address(shared)
        record[trie.IDS], record[trie.N_IDS] = address(ids), len(ids)
        return Fill(record, shared, ids)

    def fill(self, out: U32, mask: Fill) -> None:
        """Write a mask into `out`, uint32 [words or more]; further words stay as they are."""
        if self._fill is None:
            words = out[: len(self._mask)]
            words[:] = 0 if mask.shared is None else mask.shared
            np.bitwise_or.at(words, mask.ids >> 5, np.uint32(1) << (mask.ids & 31).astype(np.uint32))
            return
        own, unused = self._own, self._unused_address
        own.record[:] = mask.record
        own.record[trie.OUT] = address(out)
        self._fill(unused, unused, own.address, unused, 0, 1)

    def _follow_bytes(self, follow: frozenset[int]) -> NDArray[np.uint8]:
        flags = self._follow.get(follow)
        if flags is None:
            flags = self._follow[follow] = np.zeros(256, np.uint8)
            flags[sorted(follow)] = 1
        return flags

    def _walk_reference(self, lexeme: Lexeme, start: int, node: int) -> None:
        table, accept = lexeme.dfa.table, lexeme.dfa.accept
        states, n_staying, n_leaving = {int(self._depth[node]): (start, 0)}, 0, 0
        i, stop = node + 1, int(self._end[node])
        while i < stop:
            depth, byte = int(self._depth[i]), int(self._byte[i])
            before, count = states[depth - 1]
            state = int(table[before, byte])
            if state == 0:
                if accept[before] and byte in lexeme.follow:
                    for token in self._tokens[self._first[i] : self._first[self._end[i]]]:
                        self._leaving[n_leaving] = token, depth - 1, accept[before], count
                        n_leaving += 1
                i = int(self._end[i])
                continue
            states[depth] = state, count + (before == lexeme.counted and not accept[state])
            here = self._tokens[self._first[i] : self._first[i + 1]].tolist()
            i += 1
            for token in here:
                if lexeme.dfa.final[state]:
                    self._leaving[n_leaving] = token, depth, accept[state], states[depth][1]
                    n_leaving += 1
                    continue
                self._mask[token >> 5] |= np.uint32(1 << (token & 31))
                self._staying[n_staying] = token, states[depth][1]
                n_staying += 1
        self._n_found[:] = n_staying, n_leaving
