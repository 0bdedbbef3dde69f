"""TokenDataModule under a real Trainer: which rows are read, in which order, after which interruption."""

from __future__ import annotations

import collections
import itertools
import json
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from datamodules import BPETokenizer, ByteTokenizer, StdlibCorpus, TextFiles, TokenDataModule
from datamodules.errors import DataError
from tests.support.data_samples import ListCorpus, made_up_texts, prepared


class Reader(lightning.LightningModule):
    """Learns nothing and remembers every row it is given, by step; a row is known by its tokens."""

    def __init__(self, log_folder=None):
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.steps = collections.defaultdict(list)
        self.validated = []
        self.log_folder = log_folder

    def training_step(self, batch, _):
        inputs, targets = batch
        assert inputs.dtype == targets.dtype == torch.int64 and torch.equal(inputs[:, 1:], targets[:, :-1])
        self.steps[self.global_step] += [hash(tuple(row.tolist())) for row in inputs]
        return self.parameter.sum()

    def validation_step(self, batch, _):
        self.validated += [hash(tuple(row.tolist())) for row in batch[0]]

    test_step = predict_step = validation_step

    def on_fit_end(self):
        if self.log_folder is not None:
            path = self.log_folder / f"rank-{self.global_rank}.json"
            path.write_text(json.dumps({"steps": self.steps, "validated": self.validated}))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "set"
    rows = prepared(folder, count=62, seq_len=64, val_fraction=0.3)["splits"]["train"]["rows"]
    assert rows % 4 == 0  # so that a step of 4 rows can end with the epoch
    return folder


def module(folder, **options):
    return TokenDataModule(data_dir=folder, **{"seq_len": 64, "batch_size": 4, "val_rows": 8, **options})


def trainer(max_steps, **options):
    defaults = dict(
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing="callbacks" in options,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        check_val_every_n_epoch=None,
        val_check_interval=10**6,
    )
    return lightning.Trainer(max_steps=max_steps, **{**defaults, **options})


def read(data, max_steps, ckpt_path=None, **options):
    """Fit for some steps; rows by step."""
    reader = Reader()
    trainer(max_steps, **options).fit(reader, datamodule=data, ckpt_path=ckpt_path)
    return dict(reader.steps)


@pytest.fixture(scope="module")
def uninterrupted(folder):
    """Rows by step over a bit more than two epochs of the data."""
    rows = module(folder)
    rows.setup()
    return read(module(folder), max_steps=2 * rows.manifest["splits"]["train"]["rows"] // 4 + 10)


def test_every_epoch_holds_every_row_once_and_counts_up(folder, uninterrupted):
    data = module(folder)
    data.setup()
    count = data.manifest["splits"]["train"]["rows"]
    stream = [row for step in uninterrupted.values() for row in step]
    first, second = stream[:count], stream[count : 2 * count]
    assert sorted(first) == sorted(second) and first != second and len(set(first)) > 0.9 * count
    assert data.unique_tokens == count * 64


@pytest.mark.parametrize("stop", ["mid-epoch", "at an epoch's end", "in a later epoch"])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_resumed_run_reads_what_the_uninterrupted_one_reads(folder, uninterrupted, tmp_path, workers, stop):
    data = module(folder, num_workers=workers)
    data.setup()
    epoch = data.manifest["splits"]["train"]["rows"] // 4
    step = {"mid-epoch": 7, "at an epoch's end": epoch, "in a later epoch": epoch + 9}[stop]
    save = ModelCheckpoint(tmp_path, every_n_train_steps=step, save_top_k=-1, filename="{step}")
    before = read(data, step + 3, callbacks=[save])
    assert before == {k: uninterrupted[k] for k in range(step + 3)}
    after = read(module(folder, num_workers=workers), step + 8, tmp_path / f"step={step}.ckpt")
    assert after == {k: uninterrupted[k] for k in range(step, step + 8)}


@pytest.mark.parametrize(("batch_size", "accumulate"), [(2, 2), (1, 4)])
def test_accumulation_may_change_at_a_resume(folder, uninterrupted, tmp_path, batch_size, accumulate):
    save = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    small = read(
        module(folder, batch_size=batch_size), 5, accumulate_grad_batches=accumulate, callbacks=[save]
    )
    assert small == {k: uninterrupted[k] for k in range(5)}
    after = read(module(folder), 9, tmp_path / "step=5.ckpt")
    assert after == {k: uninterrupted[k] for k in range(5, 9)}


def test_saved_after_a_validation_and_resumed_in_mid_accumulation(folder, uninterrupted, tmp_path):
    """Checkpoints can be written between micro-batches too: the position counts micro-batches, not steps."""
    save = ModelCheckpoint(tmp_path, save_top_k=-1, save_last=True)
    read(module(folder, batch_size=2), 5, accumulate_grad_batches=2, val_check_interval=6, callbacks=[save])
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["TokenDataModule"]
    assert state["rows_consumed"] == 12 and state["batches_processed"] == 6


def test_the_same_trainer_goes_on_and_a_new_one_starts_anew(folder, uninterrupted):
    data, reader = module(folder), Reader()
    first = trainer(4)
    first.fit(reader, datamodule=data)
    assert data.rows_consumed == 16
    first.fit_loop.epoch_loop.max_steps = 7
    first.fit(reader, datamodule=data)
    assert dict(reader.steps) == {k: uninterrupted[k] for k in range(7)} and data.rows_consumed == 28
    assert read(data, 3) == {k: uninterrupted[k] for k in range(3)} and data.rows_consumed == 12


def test_a_position_loaded_by_hand_is_taken_up(folder, uninterrupted):
    data = module(folder)
    data.setup()
    state = {**data.state_dict(), "rows_consumed": 24, "batches_processed": 99}
    data.load_state_dict(state)
    assert list(read(data, 2).values()) == [uninterrupted[6], uninterrupted[7]]
    # It was meant for one trainer.
    assert read(data, 2) == {k: uninterrupted[k] for k in (0, 1)}


def test_seed_decides_the_order(folder, uninterrupted):
    assert read(module(folder, seed=1), 5) != {k: uninterrupted[k] for k in range(5)}


@pytest.mark.parametrize("workers", [0, 2])
def test_global_random_state_is_left_alone(folder, workers):
    data = module(folder, num_workers=workers)
    data.setup()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    list(itertools.islice(data.train_dataloader(), 5))
    list(data.val_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


def by_rank(path):
    logs = [json.loads((path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    steps = {int(step): sorted(logs[0]["steps"][step] + logs[1]["steps"][step]) for step in logs[0]["steps"]}
    return steps, [log["validated"] for log in logs]


def test_two_processes_read_the_same_rows_in_every_step_also_after_a_resume(folder, uninterrupted, tmp_path):
    save = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    two = dict(strategy="ddp_fork", devices=2, num_sanity_val_steps=0)
    data = module(folder, batch_size=2, val_rows=7, num_workers=1)
    trainer(5, callbacks=[save], val_check_interval=5, **two).fit(Reader(tmp_path), datamodule=data)
    expected = {k: sorted(rows) for k, rows in uninterrupted.items()}
    steps, validated = by_rank(tmp_path)
    assert steps == {k: expected[k] for k in range(5)}
    # 7 validation rows: 4 and 3, none twice.
    assert [len(rows) for rows in validated] == [4, 3] and len({*validated[0], *validated[1]}) == 7
    # Two processes -> one, and one -> two.
    alone = read(
        module(folder),
        6,
        tmp_path / "step=3.ckpt",
        callbacks=[ModelCheckpoint(tmp_path / "one", every_n_train_steps=6, filename="{step}")],
    )
    assert {k: sorted(rows) for k, rows in alone.items()} == {k: expected[k] for k in range(3, 6)}
    data = module(folder, batch_size=1)
    trainer(8, accumulate_grad_batches=2, **two).fit(
        Reader(tmp_path), datamodule=data, ckpt_path=tmp_path / "one" / "step=6.ckpt"
    )
    assert by_rank(tmp_path)[0] == {k: expected[k] for k in (6, 7)}


def test_a_checkpoint_of_other_data_is_refused_with_both_values(folder, tmp_path):
    data = module(folder)
    data.setup()
    state = data.state_dict()
    with pytest.raises(DataError, match="seed 3, but the data at hand has 0"):
        data.load_state_dict({**state, "seed": 3})
    with pytest.raises(DataError, match=f"hash abc, but the data at hand has {state['manifest_hash']}"):
        data.load_state_dict({**state, "manifest_hash": "abc"})
    # Evaluation on other data is sound, with another tokenizer it is not.
    data.trainer = fake_trainer(TrainerFn.VALIDATING)
    data.load_state_dict({**state, "manifest_hash": "abc", "seed": 3})
    with pytest.raises(DataError, match="tokenizer_sha256 abc"):
        data.load_state_dict({**state, "tokenizer_sha256": "abc"})


def fake_trainer(fn, rank=0, world_size=1):
    total = SimpleNamespace(processed=0)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(total=total)))
    return SimpleNamespace(
        state=SimpleNamespace(fn=fn), global_rank=rank, world_size=world_size, fit_loop=loop
    )


def test_how_many_validation_rows_are_used(folder):
    data = module(folder, val_rows=6, final_val_rows=11, val_batch_size=3)
    data.setup()

    def rows(loader):
        return sum(len(inputs) for inputs, _ in loader)

    assert rows(data.val_dataloader()) == 11
    data.trainer = fake_trainer(TrainerFn.FITTING)
    assert rows(data.val_dataloader()) == 6
    assert [len(inputs) for inputs, _ in data.val_dataloader()] == [3, 3]
    data.full_validation = True
    assert rows(data.val_dataloader()) == 11
    data.full_validation = False
    for fn, loader in (
        (TrainerFn.TESTING, data.test_dataloader),
        (TrainerFn.PREDICTING, data.predict_dataloader),
    ):
        data.trainer = fake_trainer(fn)
        assert rows(loader()) == 11
    available = data.manifest["splits"]["val"]["rows"]
    data.final_val_rows = 10**6
    assert rows(data.test_dataloader()) == available
    data.trainer = fake_trainer(TrainerFn.FITTING, rank=6, world_size=7)
    with pytest.raises(DataError, match=f"6 validation rows .{available} in the data. for 7 processes"):
        data.val_dataloader()


def test_validate_test_and_predict_run(folder):
    for run in ("validate", "test", "predict"):
        reader = Reader()
        getattr(trainer(1), run)(reader, datamodule=module(folder, final_val_rows=9))
        assert len(reader.validated) == 9


def test_the_corpus_is_prepared_once_and_then_found(tmp_path):
    class Counted(ListCorpus):
        reads = 0

        def documents(self, unit):
            Counted.reads += 1
            return super().documents(unit)

    def start(**options):
        data = TokenDataModule(
            ByteTokenizer(),
            Counted(made_up_texts(60)),
            seq_len=32,
            cache_dir=tmp_path,
            progress=False,
            **options,
        )
        data.prepare_data()
        data.setup("fit")
        return data

    first = start(val_fraction=0.3)
    reads = Counted.reads
    assert reads > 0 and len(list(tmp_path.glob("list-bytes-T32-*"))) == 2  # the folder and its lock
    second = start(val_fraction=0.3, seed=7, batch_size=2)
    assert Counted.reads == reads and second.manifest_hash == first.manifest_hash
    other = start(val_fraction=0.4)
    assert other.manifest_hash != first.manifest_hash
    next((other._data.folder / "val").glob("*.bin")).unlink()
    with pytest.raises(DataError, match="missing. Delete that folder and start again"):
        start(val_fraction=0.4)
    assert first.tokenizer_name == "bytes" and 2.5 < first.val_unigram_entropy < 3.5
    assert first.load_tokenizer().decode([104, 105]) == "hi"


def test_the_vocabulary_is_known_before_any_data(folder, tmp_path):
    nowhere = TextFiles([str(tmp_path / "gone")])
    assert TokenDataModule(BPETokenizer(1234), nowhere).vocab_size == 1234
    assert TokenDataModule(ByteTokenizer(), nowhere, vocab_size=32_001).vocab_size == 32_001
    assert module(folder).vocab_size == 257
    default = TokenDataModule()
    assert default.vocab_size == 1024 and default._data.folder.name.startswith("stdlib-bpe1024-T256-")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 128}, "seq_len is 128, but the data in .* was prepared with 64"),
        ({"vocab_size": 100}, "vocab_size is 100, but the tokenizer bytes"),
        ({"tokenizer": BPETokenizer()}, "the tokenizer is .*BPETokenizer"),
        ({"corpus": StdlibCorpus()}, "the corpus is .*StdlibCorpus"),
        ({"packing_buffer": 3}, "packing_buffer is 3, .* prepared with 1000"),
        ({"prepare_seed": 3}, "prepare_seed is 3, .* prepared with 0"),
    ],
)
def test_settings_that_disagree_with_given_data_are_refused(folder, options, message):
    with pytest.raises(DataError, match=message):
        module(folder, **options).setup()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "seq_len is 0"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"val_batch_size": 0}, "val_batch_size is 0"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"val_rows": 0}, "val_rows is 0"),
        ({"final_val_rows": -5}, "final_val_rows is -5"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"val_fraction": 0.0}, "val_fraction is 0.0"),
        ({"packing_buffer": 0}, "packing_buffer is 0"),
    ],
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(DataError, match=message):
        TokenDataModule(**options)


def test_data_without_a_row_is_refused_before_anything_asks_for_its_order(tmp_path):
    data = TokenDataModule(
        ByteTokenizer(), ListCorpus(made_up_texts(9)), seq_len=10**6, cache_dir=tmp_path, progress=False
    )
    with pytest.raises(DataError, match="the train split has no full row.*or a smaller seq_len"):
        data.prepare_data()
    with pytest.raises(DataError, match="no prepared data at"):
        data.setup("fit")


def test_what_needs_data_says_so_before_setup(folder):
    with pytest.raises(DataError, match=r"call prepare_data\(\) and setup\(\) first"):
        module(folder).unique_tokens  # noqa: B018
