"""The parts of layers: attention, mixers and MLPs, as rows. Every function takes the model's facts."""

from __future__ import annotations

from refit_transport.layout.presets.cuts import WHOLE, Block, Even, FirstRank, FusedRows, KeyValueRows
from refit_transport.layout.presets.facts import Facts
from refit_transport.layout.presets.rows import (
    Group,
    Packing,
    Row,
    Rows,
    column,
    divided,
    latent,
    norm,
    replicated,
    row,
    under,
    whole,
    width,
)


def grouped_query_attention(facts: Facts, *, bias: bool, output_bias: bool, qk_norm: bool, gated: bool) -> Rows:
    """`self_attn`: q, k, v with shared key-value heads. With `gated`, q rows hold a gate for every head.

    Megatron fuses q, k and v per query group. It puts a group's gates behind the group's q rows, a checkpoint each
    head's gate behind the head; which is which doesn't change what a rank holds while it holds whole groups.
    """
    hidden, heads = facts.size("hidden_size"), facts.size("num_attention_heads")
    kv_heads = facts.size("num_key_value_heads", default=heads)
    head = facts.size("head_dim", default=max(1, hidden // heads))
    q = Block(heads * head * (2 if gated else 1), heads, "attention heads")
    kv = Block(kv_heads * head, kv_heads, "key-value heads")
    part_rows = (q.size, kv.size, kv.size)
    served = (Even(0, (q,)), KeyValueRows(kv), KeyValueRows(kv))
    rows: list[Row] = []
    for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
        trained = FusedRows(part_rows, part, kv)
        packing = Packing(0, (head, head), heads) if gated and part == 0 else None
        shape = (part_rows[part], hidden)
        rows.append(Row(f"{name}.weight", shape, "attention", trained, served[part], packing=packing))
        if bias:
            rows.append(Row(f"{name}.bias", (part_rows[part],), "attention", trained, served[part]))
    rows.append(row("o_proj", hidden, Block(heads * head, heads, "attention heads"), "attention"))
    if output_bias:
        rows.append(whole("o_proj.bias", (hidden,), "attention"))
    if qk_norm:
        rows += [norm("q_norm", head), norm("k_norm", head)]
    return tuple(rows)


def attention_sinks(facts: Facts) -> Rows:
    """One learned logit per head."""
    heads = facts.size("num_attention_heads")
    return (divided("sinks", (heads,), "attention", Block(heads, heads, "attention heads")),)


def latent_attention(facts: Facts) -> Rows:
    """Multi-head latent attention: down projections on every rank, up projections and the output by heads."""
    hidden, heads = facts.size("hidden_size"), facts.size("num_attention_heads")
    latent_width, rope = facts.size("kv_lora_rank"), facts.size("qk_rope_head_dim")
    nope, value = facts.size("qk_nope_head_dim"), facts.size("v_head_dim")
    q = Block(heads * (nope + rope), heads, "attention heads")
    kv = Block(heads * (nope + value), heads, "attention heads")
    rank = facts.count("q_lora_rank")
    rows = (
        (
            latent("q_a_proj", rank, hidden, "attention"),
            norm("q_a_layernorm", rank),
            column("q_b_proj", q, rank, "attention"),
        )
        if rank
        else (column("q_proj", q, hidden, "attention"),)
    )
    return (
        *rows,
        latent("kv_a_proj_with_mqa", latent_width + rope, hidden, "attention"),
        norm("kv_a_layernorm", latent_width),
        column("kv_b_proj", kv, latent_width, "attention"),
        row("o_proj", hidden, Block(heads * value, heads, "attention heads"), "attention"),
    )


def gated_delta_net(facts: Facts, *, packed: bool) -> Rows:
    """Linear attention. `packed` (Qwen3-Next): q, k, v, z and b, a interleaved by key head in one matrix each."""
    hidden = facts.size("hidden_size")
    key_heads, value_heads = facts.size("linear_num_key_heads"), facts.size("linear_num_value_heads")
    value_head = facts.size("linear_value_head_dim")
    keys = Block(key_heads * facts.size("linear_key_head_dim"), key_heads, "linear key heads")
    values = Block(value_heads * value_head, value_heads, "linear value heads")
    heads = Block(value_heads, value_heads, "linear value heads")
    qkv = (keys, keys, values)
    width_of = sum(block.size for block in qkv)
    if packed:
        projections: Rows = (
            column(
                "in_proj_qkvz",
                Block(width_of + values.size, key_heads, keys.of),
                hidden,
                "mamba",
                fields=tuple(block.size // key_heads for block in (*qkv, values)),
            ),
            column(
                "in_proj_ba",
                Block(2 * value_heads, key_heads, keys.of),
                hidden,
                "mamba",
                fields=(value_heads // key_heads,) * 2,
            ),
        )
    else:
        projections = (
            divided("in_proj_qkv.weight", (width_of, hidden), "mamba", *qkv),
            column("in_proj_z", values, hidden, "mamba"),
            column("in_proj_b", heads, hidden, "mamba"),
            column("in_proj_a", heads, hidden, "mamba"),
        )
    return (
        *projections,
        divided("conv1d.weight", (width_of, 1, facts.size("linear_conv_kernel_dim")), "mamba", *qkv),
        divided("A_log", (value_heads,), "mamba", heads),
        divided("dt_bias", (value_heads,), "mamba", heads),
        norm("norm", value_head),
        row("out_proj", hidden, values, "mamba"),
    )


def mamba2(facts: Facts) -> Rows:
    """`in_proj` is z | x | B | C | dt and `conv1d` x | B | C, each block divided by itself."""
    hidden, state = facts.size("hidden_size"), facts.size("ssm_state_size")
    count, groups = facts.size("mamba_num_heads"), facts.size("n_groups")
    inner = Block(count * facts.size("mamba_head_dim"), count, "Mamba heads")
    heads, shared = Block(count, count, "Mamba heads"), Block(groups * state, groups, "Mamba groups")
    packed, convolved = (inner, inner, shared, shared, heads), (inner, shared, shared)
    channels = sum(block.size for block in convolved)
    rows = [
        divided("in_proj.weight", (sum(block.size for block in packed), hidden), "mamba", *packed),
        divided("conv1d.weight", (channels, 1, facts.size("conv_kernel")), "mamba", *convolved),
    ]
    if facts.get("use_conv_bias") is not False:
        rows.append(divided("conv1d.bias", (channels,), "mamba", *convolved))
    rows += [divided(name, (count,), "mamba", heads) for name in ("A_log", "D", "dt_bias")]
    gate = Block(inner.size, groups, "Mamba groups")
    return (*rows, divided("norm.weight", (inner.size,), "norm", gate), row("out_proj", hidden, inner, "mamba"))


def mlp(hidden: int, block: Block, group: Group, *, names: tuple[str, ...] = ("gate_proj", "up_proj")) -> Rows:
    """Projections up to the width, and `down_proj` back."""
    return (*(column(name, block, hidden, group) for name in names), row("down_proj", hidden, block, group))


def dense_mlp(facts: Facts) -> Rows:
    """`mlp` of a dense layer."""
    return mlp(facts.size("hidden_size"), width(facts.size("intermediate_size"), "FFN width"), "ffn")


def experts(count: int, hidden: int, size: int, *, up: tuple[str, ...], down: str) -> Rows:
    """A layer's experts, stacked per projection: up [count, size, hidden], down [count, hidden, size]."""
    block = width(size, "experts' width")
    rows, columns = Even(1, (block,)), Even(2, (block,))
    return (
        *(Row(f"experts.{name}.weight", (count, size, hidden), "expert_ffn", rows, rows, experts=True) for name in up),
        Row(f"experts.{down}.weight", (count, hidden, size), "expert_ffn", columns, columns, experts=True),
    )


def packed_experts(count: int, hidden: int, size: int) -> Rows:
    """Experts whose checkpoint has gate | up in one stacked tensor [count, 2 x size, hidden]."""
    block = width(size, "experts' width")
    rows, columns = Even(1, (block, block)), Even(2, (block,))
    return (
        Row(
            "experts.gate_up_proj",
            (count, 2 * size, hidden),
            "expert_ffn",
            rows,
            rows,
            experts=True,
            packing=Packing(1, (size, size)),
        ),
        Row("experts.down_proj", (count, hidden, size), "expert_ffn", columns, columns, experts=True),
    )


def interleaved_experts(count: int, hidden: int, size: int) -> Rows:
    """gpt-oss: inputs first, gate and up columns in turn (see `layout.canonical`), with biases."""
    block = width(size, "experts' width")
    columns, rows = Even(2, (block,)), Even(1, (block,))
    up, up_bias, down = (count, hidden, size, 2), (count, size, 2), (count, size, hidden)
    return (
        Row("experts.gate_up_proj", up, "expert_ffn", columns, columns, True, inputs_first=True),
        Row("experts.gate_up_proj_bias", up_bias, "expert_ffn", rows, rows, True),
        Row("experts.down_proj", down, "expert_ffn", rows, rows, True, inputs_first=True),
        Row("experts.down_proj_bias", (count, hidden), "expert_ffn", WHOLE, FirstRank(), True),
    )


def deepseek_moe(facts: Facts) -> Rows:
    """`mlp` of a DeepSeek-style layer: a router, experts, and shared experts as one MLP.

    The router has a correction bias, but for DeepSeek-V2's methods to choose the best experts.
    """
    hidden, count = facts.size("hidden_size"), facts.size("n_routed_experts", "num_local_experts")
    size, shared = facts.size("moe_intermediate_size"), facts.count("n_shared_experts")
    shared_mlp = mlp(hidden, width(size * shared, "shared experts' width"), "shared_expert") if shared else ()
    corrected = facts.get("topk_method") not in ("greedy", "group_limited_greedy")
    correction = (whole("gate.e_score_correction_bias", (count,), "router"),) if corrected else ()
    return (
        replicated("gate", count, hidden, "router"),
        *correction,
        *experts(count, hidden, size, up=("gate_proj", "up_proj"), down="down_proj"),
        *under("shared_experts.", *shared_mlp),
    )


def qwen_moe(facts: Facts, *, packed: bool) -> Rows:
    """`mlp` of a Qwen layer: a router, experts, and a gated shared expert where the model has one."""
    hidden, count = facts.size("hidden_size"), facts.size("num_experts", "num_local_experts")
    size, shared = facts.size("moe_intermediate_size"), facts.count("shared_expert_intermediate_size")
    routed = (
        packed_experts(count, hidden, size)
        if packed
        else experts(count, hidden, size, up=("gate_proj", "up_proj"), down="down_proj")
    )
    rows = (replicated("gate", count, hidden, "router"), *routed)
    if not shared:
        return rows
    shared_mlp = mlp(hidden, width(shared, "shared experts' width"), "shared_expert")
    return (*rows, *under("shared_expert.", *shared_mlp), replicated("shared_expert_gate", 1, hidden, "router"))
