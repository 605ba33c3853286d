"""One layer: attention, then a feed-forward network (read `ops/interface.py` next).

    x += post_norm(mixer(norm(x)));    x += post_norm(ffn(norm(x)))        a norm may be missing

A sublayer adds itself: its last product (`Stream.add_product`), or any sum (`Stream.add`).
`weights.py` makes the weights, `ops/reference.py` defines the operations.
"""

from martlet.models.weights import LayerWeights, MoeWeights
from martlet.ops.interface import Array, Backend, Rows, Weight
from martlet.spec import Attention, DenseFfn, Layer, MoeFfn, Norm


class Stream:
    """The residual stream `x`, float32 [rows, width], and the scratch that all layers share.

    `scale` multiplies what is added to x. Layers run one after the other, so an array of scratch
    serves the same purpose in each.
    """

    def __init__(self, ops: Backend, width: int, scale: float) -> None:
        self.ops = ops
        self.rows = Rows.TOKENS
        self.x = ops.empty(Rows.TOKENS, width)
        self.width = width
        self._scale = scale
        self._scratch: dict[tuple[str, Rows, int], Array] = {}

    def scratch(self, purpose: str, width: int) -> Array:
        """The array [rows, width] that all layers use for this purpose; its old values are lost."""
        key = (purpose, self.rows, width)
        if key not in self._scratch:
            self._scratch[key] = self.ops.empty(self.rows, width)
        return self._scratch[key]

    def normed(self, norm: Norm | None, weight: Array | None) -> Array:
        """norm(x) [rows, width], or x itself where the model has no norm here."""
        if norm is None:
            return self.x
        out = self.scratch("normed", self.width)
        self.ops.rms_norm(self.x, weight, norm.eps, out)
        return out

    def add_product(
        self,
        y: Array,
        weight: Weight,
        bias: Array | None = None,
        norm: Norm | None = None,
        norm_weight: Array | None = None,
        adapter: Array | None = None,
    ) -> None:
        """x += scale * norm(y @ weightᵀ + bias), in as few operations as the model allows.

        y is [rows, k], `weight` [width, k]; `adapter` is the table of the product's low-rank
        updates.
        """
        if norm is None and self._scale == 1.0:
            self.ops.linear(y, weight, self.x, bias, self.x)
            if adapter is not None:
                self.ops.lora(y, adapter, self.x)
            return
        out = self.scratch("added", self.width)
        self.ops.linear(y, weight, out, bias)
        if adapter is not None:
            self.ops.lora(y, adapter, out)
        self.add(out, norm, norm_weight)

    def add(self, y: Array, norm: Norm | None = None, norm_weight: Array | None = None) -> None:
        """x += scale * norm(y), y [rows, width]: where a sublayer ends that is no single product.

        What ranks computed of y comes together before this.
        """
        if norm is not None:
            self.ops.rms_norm(y, norm_weight, norm.eps, y)
        self.ops.add(self.x, y, self._scale, self.x)

    def narrow(self, y: Array, width: int) -> Array:
        """Keep the rows that get logits: x becomes [L, C]; y [T, width] returns as [L, width]."""
        x, picked = self.ops.empty(Rows.LOGITS, self.width), self.ops.empty(Rows.LOGITS, width)
        self.ops.take_logit_rows(self.x, x)
        self.ops.take_logit_rows(y, picked)
        self.x, self.rows = x, Rows.LOGITS
        return picked


def run_layer(
    stream: Stream,
    layer: Layer,
    weights: LayerWeights,
    cache: Array,
    *,
    mixer_input: Array | None = None,
    narrows: bool = False,
) -> None:
    """Run a layer on the stream; its keys and values go to `cache`.

    The mixer reads the normed stream, or `mixer_input` [T, X] if given. `narrows` drops the rows
    that get no logits once the mixer has written keys and values for all rows.
    """
    match layer.mixer:
        case Attention() as attention:
            _attend(stream, attention, layer, weights, cache, mixer_input, narrows)
    match layer.ffn:
        case DenseFfn() as ffn:
            _feed_forward(stream, ffn, layer, weights)
        case MoeFfn() as ffn:
            _mix_experts(stream, ffn, layer, weights)


def _attend(
    stream: Stream, spec: Attention, layer: Layer, weights: LayerWeights, cache: Array, x: Array | None, narrows: bool
) -> None:
    """Project, normalise, rotate, write the cache, attend, and add the output's projection."""
    ops, mixer, adapters = stream.ops, weights.mixer, weights.adapters
    q_width, kv_width = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    qkv = stream.scratch("qkv", q_width + 2 * kv_width)
    if x is None:
        x = stream.normed(layer.mixer_norm, weights.mixer_norm)
    ops.linear(x, mixer.qkv, qkv, mixer.qkv_bias)

    q = ops.columns(qkv, 0, q_width)  # [T, H * D]
    k = ops.columns(qkv, q_width, q_width + kv_width)  # [T, G * D]
    v = ops.columns(qkv, q_width + kv_width, q_width + 2 * kv_width)
    for out, name in ((q, "attn_q"), (k, "attn_k"), (v, "attn_v")):
        if name in adapters:
            ops.lora(x, adapters[name], out)
    if spec.qk_norm is not None:
        ops.rms_norm(q, mixer.q_norm, spec.qk_norm.eps, q)
        ops.rms_norm(k, mixer.k_norm, spec.qk_norm.eps, k)
    if spec.rope is not None:
        ops.rope(q, spec.head_dim, spec.rope, q)
        ops.rope(k, spec.head_dim, spec.rope, k)
    ops.kv_write(k, v, cache)
    y = stream.scratch("attended", q_width)
    ops.attention(q, cache, spec, y, mixer.sinks)
    if narrows:
        y = stream.narrow(y, q_width)  # [L, H * D]
    norm, norm_weight = layer.post_mixer_norm, weights.post_mixer_norm
    stream.add_product(y, mixer.out, mixer.out_bias, norm, norm_weight, adapters.get("attn_output"))


def _feed_forward(stream: Stream, spec: DenseFfn, layer: Layer, weights: LayerWeights) -> None:
    """Add down(act(gate(x)) * up(x))."""
    ops, ffn, adapters = stream.ops, weights.ffn, weights.adapters
    gate_up = stream.scratch("gate_up", 2 * spec.ffn_hidden)
    x = stream.normed(layer.ffn_norm, weights.ffn_norm)
    ops.linear(x, ffn.gate_up, gate_up)
    for start, name in ((0, "ffn_gate"), (spec.ffn_hidden, "ffn_up")):
        if name in adapters:
            ops.lora(x, adapters[name], ops.columns(gate_up, start, start + spec.ffn_hidden))
    y = stream.scratch("gated", spec.ffn_hidden)
    ops.act_mul(gate_up, spec.activation, y)
    norm, norm_weight = layer.post_ffn_norm, weights.post_ffn_norm
    stream.add_product(y, ffn.down, None, norm, norm_weight, adapters.get("ffn_down"))


def _mix_experts(stream: Stream, spec: MoeFfn, layer: Layer, weights: LayerWeights) -> None:
    """Add the chosen experts' outputs by their weights, and that of the shared network."""
    ops, ffn, routing = stream.ops, weights.ffn, spec.routing
    n, hidden = routing.n_chosen, spec.expert_hidden
    x = stream.normed(layer.ffn_norm, weights.ffn_norm)
    gate_up = stream.scratch("experts_gate_up", n * 2 * hidden)
    gated = stream.scratch("experts_gated", n * hidden)
    parts = stream.scratch("experts_down", n * stream.width)
    scores, choice = stream.scratch("scores", routing.n_experts), stream.scratch("choice", 2 * n)
    y = stream.scratch("added", stream.width)

    ops.linear(x, ffn.router, scores, ffn.router_bias)
    ops.route(scores, routing, ffn.correction, choice)
    ops.expert_linear(x, choice, ffn.gate_up, gate_up, ffn.gate_up_bias)
    ops.act_mul(gate_up, spec.activation, gated, n)
    ops.expert_linear(gated, choice, ffn.down, parts, ffn.down_bias)
    ops.combine(parts, choice, y)
    if spec.shared is not None:
        _add_shared(stream, spec.shared, x, ffn, y)
    stream.add(y, layer.post_ffn_norm, weights.post_ffn_norm)


def _add_shared(stream: Stream, spec: DenseFfn, x: Array, ffn: MoeWeights, y: Array) -> None:
    """y += the shared network's output for x, by its gate if it has one; x, y [rows, C]."""
    ops = stream.ops
    gate_up, gated = stream.scratch("gate_up", 2 * spec.ffn_hidden), stream.scratch("gated", spec.ffn_hidden)
    ops.linear(x, ffn.shared_gate_up, gate_up)
    ops.act_mul(gate_up, spec.activation, gated)
    if ffn.shared_gate is None:
        ops.linear(gated, ffn.shared_down, y, None, y)
        return
    out, score = stream.scratch("shared", stream.width), stream.scratch("shared_score", 1)
    ops.linear(gated, ffn.shared_down, out)
    ops.linear(x, ffn.shared_gate, score)
    ops.gate(out, score, out)
    ops.add(y, out, 1.0, y)
