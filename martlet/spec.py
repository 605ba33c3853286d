"""A model as data: dataclasses that a family's function makes (read `models/decoder.py` next).

An optional feature is an optional component, matched by type; there are no flags to test. Shape
letters: T tokens in the step, H heads, G KV heads, D head dim, C hidden, F ffn, V vocab, E experts,
S chosen experts.
"""

from dataclasses import dataclass
from enum import StrEnum


class Activation(StrEnum):
    """The non-linearity of a gated feed-forward network: act(gate) * up."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"  # the tanh approximation
    GELU = "gelu"  # exact, by erf
    # Not act(gate) * up: gate * sigmoid(1.702 gate) * (up + 1), both within ±7 but for a low gate
    # (arXiv:2508.10925).
    SWIGLU_OAI = "swiglu_oai"


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square norm: x / sqrt(mean(x²) + eps) * weight (arXiv:1910.07467)."""

    eps: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (arXiv:2104.09864), always with the pairs (i, i + dims/2).

    `inverse_frequencies` has dims/2 entries with every scaling rule (linear, llama3, longrope,
    yarn) already applied; `magnitude` multiplies cos and sin (longrope, yarn). Of two sets in a
    file (longrope), the engine's context selects one.
    """

    dims: int  # leading dimensions of a head that rotate
    inverse_frequencies: tuple[float, ...]
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention (arXiv:2305.13245) with its optional components."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float  # multiplies q·k
    rope: Rope | None  # None: no position embedding in this layer (NoPE)
    window: int | None = None  # a token sees itself and the window - 1 before it
    softcap: float | None = None  # cap * tanh(scores / cap)
    qk_norm: Norm | None = None  # RMS norm of queries and keys before RoPE
    qk_norm_per_head: bool = True  # False: over all heads at once (olmo2)
    bias: bool = False  # q, k and v have a bias
    out_bias: bool = False
    sinks: bool = False  # each head has a score that belongs to no position (arXiv:2309.17453)


@dataclass(frozen=True, slots=True)
class DenseFfn:
    """Gated feed-forward network (arXiv:2002.05202): down(act(gate(x)) * up(x))."""

    ffn_hidden: int
    activation: Activation


class Scoring(StrEnum):
    """What a router's scores become before they weigh experts."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts a token goes to, and their weights (`ops/reference.py`, `route`)."""

    n_experts: int
    n_chosen: int
    scoring: Scoring = Scoring.SOFTMAX
    normalised: bool = True  # the weights of the chosen add up to 1
    scale: float = 1.0  # multiplies the weights
    # Only experts of the best groups are chosen (arXiv:2405.04434). A group is `n_experts /
    # n_groups` neighbours; its `n_ranking` best experts, added, rank it.
    n_groups: int = 1
    n_groups_chosen: int = 1
    n_ranking: int = 1


@dataclass(frozen=True, slots=True)
class MoeFfn:
    """Mixture of experts (arXiv:2401.04088): Σ weight · expert(x) over the chosen, and `shared`(x).

    Each expert is a gated network, of `expert_hidden` channels.
    """

    routing: Routing
    expert_hidden: int
    activation: Activation
    correction: bool = False  # a bias of each expert counts in the choice, not in the weights
    router_bias: bool = False
    bias: bool = False  # of each expert's products
    shared: DenseFfn | None = None  # a network that every token goes through
    shared_gated: bool = False  # its output times sigmoid(x · a vector)

    @property
    def has_shared_gate(self) -> bool:
        """Whether there is a shared network with a gate."""
        return self.shared is not None and self.shared_gated


@dataclass(frozen=True, slots=True)
class Layer:
    """A transformer layer: x += post(mixer(norm(x))); x += post(ffn(norm(x))). No norm: None."""

    mixer: Attention
    ffn: DenseFfn | MoeFfn
    mixer_norm: Norm | None
    ffn_norm: Norm | None
    post_mixer_norm: Norm | None = None
    post_ffn_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole decoder, as data."""

    family: str
    name: str
    vocab: int
    hidden: int
    context: int  # positions the model was trained for
    layers: tuple[Layer, ...]
    final_norm: Norm
    tied_embeddings: bool
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # multiplies each sublayer's output before it is added (granite)
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def untied_embeddings(self) -> bool:
        """Whether logits come from a matrix of their own."""
        return not self.tied_embeddings
