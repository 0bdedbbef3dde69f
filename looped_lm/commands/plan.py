"""`python -m looped_lm plan`: size and cost of a run, from a model on the meta device; trains nothing."""

from __future__ import annotations

from looped_lm.common.text import aligned
from looped_lm.configuration.config_files import resolve_arguments
from looped_lm.configuration.parser import PlanCLI, processes
from looped_lm.model.accounting import CONVENTIONS, mean_flops_per_token
from looped_lm.training.lightning_module import LoopedLM
from looped_lm.training.memory import estimate
from looped_lm.training.schedules import accumulation

MIB = 2**20


def table(model: LoopedLM, batch_size: int, devices: int) -> str:
    """The plan of a run as text. The model may be on the meta device; `batch_size` is rows per micro-batch.

    Raises:
        UserError: the batch is not a whole number of micro-batches.
    """
    net, sections, plan = model.model, model.sections, model.plan
    micro_batches = accumulation(model.batch_tokens, batch_size, model.seq_len, devices)
    memory = estimate(net, batch_size, model.seq_len, model.optimizer_factory, max(model.drawn))
    layers = f"{len(net.prelude)}-{len(net.block)}-{len(net.coda)}"
    heads = f"{net.n_heads} heads of {net.head_dim}, {net.n_kv_heads} key/value heads"
    batch = f"{devices} x {batch_size} rows x {model.seq_len} x {micro_batches}"
    rows = [("layout", f"{layers}, the block run {net.num_recurrences} times")]
    if model.recurrences.varies:
        mean = sum(r * steps for r, steps in model.drawn.items()) / sum(model.drawn.values())
        drawn = f"drawn for every step: {min(model.drawn)} to {max(model.drawn)}, mean {mean:.2f}"
        rows.append(("recurrences in training", drawn))
    rows += [
        ("width", f"d_model {net.d_model}, {heads}"),
        ("vocabulary", f"{net.vocab_size:,} (tables padded to {net.head.out_features:,})"),
        ("", ""),
        *((f"parameters: {name}", f"{n:,}") for name, n in sections.as_dict().items()),
        ("N_once", f"{sections.n_once:,}"),
        ("N_rec", f"{sections.n_rec:,}"),
        ("N (without embedding and head)", f"{sections.n:,}"),
        ("", ""),
        *(
            (f"FLOPs/token ({name})", f"{mean_flops_per_token(net, model.seq_len, model.drawn, name):.6e}")
            for name in CONVENTIONS
        ),
        ("training FLOPs", f"{plan.steps * model.batch_tokens * model.flops_per_token:.4e}"),
        ("FLOPs budget", "none" if plan.flops_budget is None else f"{plan.flops_budget:.4e}"),
        ("optimizer steps", f"{plan.steps:,}"),
        ("tokens", f"{plan.steps * model.batch_tokens:,} (target {plan.tokens:,.0f})"),
        ("batch", f"{model.batch_tokens:,} tokens = {batch}"),
        ("", ""),
        *((f"learning rate: {role}", f"{rate:.6g}") for role, rate in model.learning_rates().items()),
        ("", ""),
        ("memory per process (estimate, fp32 throughout)", f"{memory.total / MIB:,.0f} MiB"),
        ("  weights", f"{memory.weights / MIB:,.1f} MiB"),
        ("  gradients", f"{memory.gradients / MIB:,.1f} MiB"),
        ("  optimizer state", f"{memory.optimizer / MIB:,.1f} MiB"),
        ("  kept for backward", f"{memory.activations / MIB:,.1f} MiB"),
    ]
    return aligned(rows[0], rows[1:], left=2)


def main(args: list[str]) -> None:
    """Run the command."""
    cli = PlanCLI(resolve_arguments(args))
    trainer = cli.config.trainer
    print(table(cli.model, cli.datamodule.batch_size, processes(trainer.devices, trainer.num_nodes)))
