"""A program's records: one operation each, as 32 int64 fields that a compiled kernel reads.

Read `program.py` next.

    kernel(record, step, thread, n_threads)

`record` points to the fields named here, `step` to the step's header: sizes and addresses that
differ from step to step. Fields hold sizes, byte addresses or the bits of a float. They are plain
integers because compiled code indexes with them. An operation's own fields begin at ARGS; a
`Fields` names them, for its kernel and for who fills the record.
"""

import struct
from collections.abc import Iterator

RECORD_FIELDS = 32
ROWS_PER_TILE = 8  # activation rows whose bytes lie together, block by block
SUMS_PER_BLOCK = 3  # of activations: columns 0 … 15, 16 … 31, and all 32

# Fields of every record.
KERNEL = 0  # address of the compiled kernel
BARRIER = 1  # 1: all threads meet before it; 2: and the program ends if STEP_ENDED is set
COUNTER = 2  # address of the operation's count of claimed work
ROWS = 3  # which field of the step holds the number of rows
ARGS = 4
# Where the output's byte form goes (`quantize.py`): four addresses, then its blocks; 0: nowhere.
BYTES = 24
# What a waiting thread prefetches: an address, and bytes from thread to thread.
AHEAD, AHEAD_STRIDE = 30, 31


class Fields:
    """The names of one operation's own fields, in their order from ARGS on.

    Iterating gives their numbers in a record; calling it with a value for each name gives the
    values in order.
    """

    def __init__(self, names: str) -> None:
        self.names = tuple(names.split())
        assert ARGS + len(self.names) <= BYTES

    def __iter__(self) -> Iterator[int]:
        return iter(range(ARGS, ARGS + len(self.names)))

    def __call__(self, **values: int) -> list[int]:
        assert values.keys() == set(self.names), f"of the record: {values.keys() ^ set(self.names)}"
        return [values[name] for name in self.names]


_ROWWISE = "IN IN_STRIDE OUT OUT_STRIDE WIDTH"  # strides are in floats, here and below
ACT_MUL = Fields(f"{_ROWWISE} N_GATES")  # WIDTH is of OUT, and of one gate
ADD = Fields(f"{_ROWWISE} OTHER OTHER_STRIDE SCALE")
ADVANCE = Fields("GUESSES GUESSES_STRIDE")
ARGMAX = Fields(f"{_ROWWISE} TOKENS BEFORE BEFORE_STRIDE")  # BEFORE 0: none
ATTENTION = Fields(
    "Q Q_STRIDE OUT OUT_STRIDE KEYS VALUES KEY_BYTES VALUE_BYTES"  # bytes: of one head, a page
    " N_KV_HEADS HEADS_PER_KV HEAD_DIM SCALE SOFTCAP WINDOW"  # SOFTCAP and WINDOW 0: none
    " SCRATCH PARTIALS N_PARTIALS"  # N_PARTIALS: states that a step's shared tiles may use
    " RECENT N_PAGES SINKS"  # RECENT: of q4, as `recent_place` takes it; SINKS 0: none
)
CHOOSE = Fields(_ROWWISE)
# CODEBOOK 0, here and below: codes are values.
EMBED = Fields("TABLE N_COLUMNS GROUP_BYTES CODEBOOK SCALE OUT OUT_STRIDE")
KV_WRITE = Fields("K K_STRIDE V V_STRIDE TO_KEYS TO_VALUES KV_HEADS KV_DIM RECENT N_PAGES")
_PRODUCT = (
    "WEIGHT N_ROWS N_COLUMNS GROUP_BYTES CODEBOOK"
    " X X_SCALES X_SUMS X_MINS X_STRIDE"  # bytes have scales, sums, minimums; float32 has a stride
    " OUT OUT_STRIDE BIAS"  # BIAS 0: none
    " UNPACKED UNPACKED_BYTES"  # of quantised ones: where a thread unpacks groups, bytes a thread
)
LINEAR = Fields(f"{_PRODUCT} RESIDUAL RESIDUAL_STRIDE")  # RESIDUAL 0: none
# WEIGHT is a table of addresses, X what `GATHER_ROWS` has put together; SLOT_STRIDE is from one
# slot's columns of OUT to the next's, and of a bias from one expert's to the next's.
EXPERT_LINEAR = Fields(f"{_PRODUCT} SLOT_STRIDE ORDER PAIRS")
SORT_CHOICES = Fields("ORDER PAIRS TILES CHOICE CHOICE_STRIDE N_CHOSEN N_EXPERTS")
GATHER_ROWS = Fields(
    "ORDER PAIRS TILES X X_SCALES X_SUMS X_MINS X_STRIDE TO TO_SCALES TO_SUMS TO_MINS N_COLUMNS"
    " SLOT_COLUMNS X_COLUMNS"  # SLOT_COLUMNS: from one slot's columns of X to the next's, or 0
)
ROUTE = Fields(
    f"{_ROWWISE} CHOSEN SIGMOID NORMALISED FACTOR BIAS N_GROUPS GROUPS_CHOSEN N_RANKING SCRATCH"
)  # WIDTH is E; BIAS 0: none
COMBINE = Fields(f"{_ROWWISE} CHOICE CHOICE_STRIDE CHOSEN")  # WIDTH is OUT's
GATE = Fields(f"{_ROWWISE} SCORES SCORES_STRIDE GROUPS")
LORA = Fields("IN IN_STRIDE OUT OUT_STRIDE K N TABLE SCRATCH BY_LOGIT_ROW")
MASK_FILL = Fields("OUT N_WORDS SHARED IDS N_IDS")
PACK = Fields("SRC SRC_ROW_BYTES DST GROUP_BYTES N_GROUPS N_COLUMNS")
QUANTIZE = Fields("IN IN_STRIDE N_COLUMNS")
READ = Fields("BUFFER N_CHUNKS RESULT")
RMS_NORM = Fields(f"{_ROWWISE} NORM_WEIGHT EPS GROUPS")  # WIDTH is a group's
ROPE = Fields("IN IN_STRIDE OUT OUT_STRIDE HEADS HEAD_DIM ANGLES ROPE_HALF")
ROPE_TABLE = Fields("FREQUENCIES HALF MAGNITUDE TABLE")  # FREQUENCIES are float64
SCALE_CAP = Fields(f"{_ROWWISE} FACTOR CAP")  # CAP 0: none
TAKE_ROWS = Fields(_ROWWISE)
TRIE_WALK = Fields(
    "BYTE END DEPTH FIRST TOKENS TABLE ACCEPT FOLLOW START NODE COUNTED SCRATCH MASK STAYING LEAVING N_FOUND FINAL"
)

ORDER_HEAD, ORDER_WORDS = 2, 4  # of an order of pairs (`route.py`): int32 before, and for each expert

# Fields of a step's header; arrays are int32 (ops/interface.py, StepInputs) and stand as addresses.
STEP_TOKENS, STEP_LOGITS, STEP_SEQS = 0, 1, 2  # T, L, B
STEP_IDS, STEP_POSITIONS, STEP_SLOTS, STEP_SPAN_STARTS = 3, 4, 5, 6
STEP_PAGE_TABLE, STEP_PAGE_STRIDE, STEP_LOGIT_ROWS = 7, 8, 9
STEP_RECENT_SLOTS, STEP_RECENT_TABLE = 10, 11  # the table has the page table's stride
STEP_LORA_SLOTS = 12  # each row's slot in the tables of `lora.py`; below 0: none
STEP_LEAST, STEP_ENDED = (
    16,
    17,
)  # bits of the chance from which on `advance` goes on; 1: it did not, and nothing more is run
STEP_FIELDS = 18
MAX_RANK = 512  # of a low-rank update

# A team's control block (`team.py`), in words of 8 bytes; what several threads write has a line of
# its own.
LINE_WORDS = 8
ARRIVALS, STEP_NUMBER = 0, LINE_WORDS
BASE, RECORDS, N_RECORDS, STEP_ADDRESS, STOPPING = range(2 * LINE_WORDS, 2 * LINE_WORDS + 5)
SLEEPING = 3 * LINE_WORDS  # + LINE_WORDS * worker: 1 while it sleeps in Python
LAUNCHED = 2 * LINE_WORDS + 5  # 1 while a step has begun that the main thread has yet to walk
TO_WAKE = SLEEPING + 1  # + LINE_WORDS * worker: 1 from `launch`, if Python has to wake it

# Fields of the record of `launch` and `serve`.
CONTROL, LAST = 4, 5
IDLE_SPINS = 40_000  # looks for a step before a worker sleeps: about a millisecond

# Attention (`attention.py`): a page's positions, and a thread's scratch in floats: queries, scores
# and then p, α, a page's largest scores and sums, and two states of a tile's rows: that of a
# segment and that of all before it. A state holds of each row the largest score and the sum of p,
# how many segments have arrived (where threads share a row), and the rows' sums of p times values.
PAGE, MAX_HEAD_DIM = 32, 512
# As in kv_types.py; copied, because kernels are kept by the text of this folder alone.
RECENT_TOKENS, KV_BLOCK = 64, 32
SEGMENT_PAGES = 8
Q_STRIDE_FLOATS = MAX_HEAD_DIM + 16  # no power of two, at which rows would share cache sets
LARGEST, TOTALS, ARRIVED, SUMS = 0, 16, 32, 48
SCORES = ROWS_PER_TILE * Q_STRIDE_FLOATS
ALPHAS = SCORES + ROWS_PER_TILE * PAGE
NEW_LARGEST, NEW_TOTALS = ALPHAS + 16, ALPHAS + 32
SEGMENT_STATE = ALPHAS + 48


def float_bits(value: float) -> int:
    """A float32 as a field."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def state_floats(head_dim: int) -> int:
    """Floats of a state."""
    return SUMS + ROWS_PER_TILE * ((head_dim + 15) // 16 * 16)


STATE = SEGMENT_STATE + state_floats(MAX_HEAD_DIM)
# Of q4: queries times scales, p times scales, and each row's constant.
SCALED_Q = STATE + state_floats(MAX_HEAD_DIM)
SCALED_P = SCALED_Q + ROWS_PER_TILE * Q_STRIDE_FLOATS
CONSTANTS = SCALED_P + ROWS_PER_TILE * PAGE
SCRATCH_FLOATS = CONSTANTS + 16
