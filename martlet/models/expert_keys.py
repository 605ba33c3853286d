"""What a file says of its mixture of experts (read `families.py` next, whose records differ in it).

A file that describes experts that cannot be is a FormatError.
"""

from dataclasses import dataclass

from martlet.errors import UnsupportedError
from martlet.models.keys import Keys
from martlet.spec import Routing, Scoring

# A file's own key before a family's default.
EXPERT_COUNTS = ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts")
# Of llama.cpp; 3 is a softmax over the chosen, which normalising makes of 1.
GATING_FUNCTIONS = {1: Scoring.SOFTMAX, 2: Scoring.SIGMOID, 3: Scoring.SOFTMAX}
MAX_EXPERTS = 4096  # a file that says more is hostile


@dataclass(frozen=True, slots=True)
class ExpertMeta:
    """A model's mixture of experts."""

    routing: Routing
    hidden: int  # channels of an expert
    shared_hidden: int = 0  # channels of the network that every token goes through; 0: none
    dense: frozenset[int] = frozenset()  # layers that have no experts


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """How a family's config.json describes its experts, where families differ."""

    hidden: str | None = "moe_intermediate_size"  # None: its config.json has no experts
    normalised: bool | None = None  # None: `norm_topk_prob` says
    gguf_normalised: bool = True  # llama.cpp has it for the family
    shared_gated: bool = False
    biases: bool = False  # of the router and of experts
    scoring: Scoring = Scoring.SOFTMAX
    correction: bool = False


def gguf_experts(keys: Keys, names: ExpertKeys | None, n_layers: int) -> ExpertMeta | None:
    """The mixture of experts that a GGUF file describes, None if it has none.

    Raises FormatError, and UnsupportedError for experts in a family without any.
    """
    if not keys.get("expert_count", (int,), 0):
        return None
    if names is None:
        raise UnsupportedError("expert_count: experts in a family that has none here")
    gating = keys.get("expert_gating_func", (int,), 2 if names.scoring is Scoring.SIGMOID else 1)
    if gating not in GATING_FUNCTIONS:
        raise UnsupportedError(f"expert_gating_func = {gating}", map(str, GATING_FUNCTIONS))
    routing = Routing(
        keys.size("expert_count"),
        keys.size("expert_used_count"),
        GATING_FUNCTIONS[gating],
        keys.get("expert_weights_norm", (bool,), names.gguf_normalised) or gating == 3,
        keys.positive("expert_weights_scale", 1.0),
        *_groups(keys, names, "expert_group_count", "expert_group_used_count"),
    )
    hidden = keys.count("expert_feed_forward_length") or keys.size("feed_forward_length")
    shared = keys.count("expert_shared_feed_forward_length") or hidden * keys.count("expert_shared_count")
    first, every = keys.count("leading_dense_block_count"), keys.size("interleave_moe_layer_step", 1)
    return _checked_experts(keys, ExpertMeta(routing, hidden, shared, _dense_layers(n_layers, first, every)))


def _groups(keys: Keys, names: ExpertKeys, n_groups: str, n_chosen: str) -> tuple[int, int, int]:
    """The last fields of a `Routing`: two experts rank a group where there is a correction."""
    return keys.size(n_groups, 1), keys.size(n_chosen, 1), 2 if names.correction else 1


def _dense_layers(n_layers: int, first: int, every: int) -> frozenset[int]:
    """Layers without experts: those before `first`, and all but the last of each `every`."""
    return frozenset(i for i in range(n_layers) if i < first or (i + 1) % every)


def _checked_experts(keys: Keys, experts: ExpertMeta) -> ExpertMeta:
    """The description, if it can be true. FormatError if not."""
    routing = experts.routing
    size = routing.n_experts // routing.n_groups
    grouped = routing.n_groups > 1 and size < routing.n_ranking
    if grouped or routing.n_experts % routing.n_groups or routing.n_groups_chosen > routing.n_groups:
        keys.fail(f"{routing.n_groups_chosen} of {routing.n_groups} groups of {routing.n_experts} experts")
    if routing.n_chosen > size * routing.n_groups_chosen or routing.n_experts > MAX_EXPERTS:
        keys.fail(
            f"{routing.n_chosen} of {routing.n_experts} experts, expected at most {MAX_EXPERTS} and no more chosen"
        )
    return experts


def config_experts(keys: Keys, names: ExpertKeys | None, n_layers: int) -> ExpertMeta | None:
    """The mixture of experts that a config.json describes, None if it has none."""
    counts = [key for key in EXPERT_COUNTS if keys.get(key, (int,), 0)]
    if names is None or names.hidden is None or not counts:
        return None
    normalised = names.normalised
    if normalised is None:
        normalised = keys.get("norm_topk_prob", (bool,), False)
    routing = Routing(
        keys.size(counts[0]),
        keys.size("num_experts_per_tok", keys.count("moe_k") or None),
        names.scoring,
        normalised,
        keys.positive("routed_scaling_factor", 1.0),
        *_groups(keys, names, "n_group", "topk_group"),
    )
    hidden = keys.size(names.hidden)
    shared = sum(map(keys.count, ("shared_expert_intermediate_size", "shared_intermediate_size")))
    shared += hidden * sum(map(keys.count, ("n_shared_experts", "moe_num_shared_experts")))
    first = keys.count("first_k_dense_replace") or keys.count("moe_layer_start_index")
    every = keys.size("decoder_sparse_step", keys.size("moe_layer_interval", 1))
    listed, end = keys.get("mlp_only_layers", (list,), []), keys.get("moe_layer_end_index", (int,), -1)
    dense = {i for i in range(n_layers) if i in listed or 0 <= end < i}
    return _checked_experts(keys, ExpertMeta(routing, hidden, shared, _dense_layers(n_layers, first, every) | dense))
