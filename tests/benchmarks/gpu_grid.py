"""An iso-depth grid and its phi in ten minutes of one GPU: python tests/benchmarks/gpu_grid.py [--json FILE]

It trains the runs of gpu_grid.yaml with `sweep run`, several at a time, and fits the joint law to their records with
`python -m fitting`. After --minutes it stops the sweep and fits the finished runs. Without a GPU it runs a tiny grid on
the CPU (gpu_grid_cpu.yaml), whose phi means nothing. The exit status is 1 if runs are missing or there is no phi.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from fitting.records import RECORD_SUFFIX, RunRecord  # noqa: E402
from looped_lm.sweeps import files  # noqa: E402

HERE = Path(__file__).parent
GPU_SWEEP, CPU_SWEEP = HERE / "gpu_grid.yaml", HERE / "gpu_grid_cpu.yaml"
#: Seconds kept for runs to save when the time is up, and for the fit.
SAVING, FITTING = 30.0, 60.0


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", *words]


def environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def train(sweep: Path, out: Path, jobs: int, seconds: float) -> tuple[float, bool]:
    """Run a sweep, with its output on stderr; returns its seconds and whether all runs are finished."""
    began = time.perf_counter()
    words = command("looped_lm", "sweep", "run", str(sweep), "--jobs", str(jobs), "--out", str(out))
    with subprocess.Popen(words, env=environment(), stdout=sys.stderr) as running:
        try:
            running.wait(timeout=max(seconds, 1.0))
        except subprocess.TimeoutExpired:
            print("The time is up.", file=sys.stderr, flush=True)
            # Its runs save and end, as they do on any SIGTERM.
            running.terminate()
            try:
                running.wait(timeout=SAVING)
            except subprocess.TimeoutExpired:
                print("Runs did not save in time and are killed.", file=sys.stderr, flush=True)
                running.kill()
    return time.perf_counter() - began, running.returncode == 0


def fit(records: Path, starts: int, resamples: int, seconds: float) -> dict[str, Any]:
    """The content of fit.json for these records; if there is none, the reason under `refused`."""
    options = ["--json", "--no-rivals", "--starts", str(starts), "--bootstrap", str(resamples), "--quiet"]
    try:
        done = subprocess.run(
            command("fitting", "fit", str(records), *options),
            env=environment(), capture_output=True, text=True, timeout=max(seconds, FITTING),
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return {"refused": f"the fit took more than {late.timeout:.0f} s; fewer --starts or --resamples"}
    if done.returncode not in (0, 1):
        return {"refused": done.stderr.strip()}
    analysis: dict[str, Any] = json.loads(done.stdout)
    return analysis


def phi_line(analysis: dict[str, Any]) -> str:
    """phi with its interval and status, or why there is none."""
    if "refused" in analysis:
        return f"no phi: {analysis['refused']}"
    found = analysis["fit"]
    best = next((i for i in found["intervals"].get("phi", ()) if i["recommended"]), None)
    interval = f"[{best['low']:.3f}, {best['high']:.3f}]" if best else "no interval"
    doubt = "" if found["status"] == "ok" else ", not to be trusted"
    refused = f"; {analysis['intervals_refused']}" if "intervals_refused" in analysis else ""
    return (
        f"phi {found['parameters']['phi']:.3f} {interval}, {found['runs']} runs, split {found['split']}, "
        f"status {found['status']}{doubt} ({found['message']}{refused})"
    )


def table(analysis: dict[str, Any]) -> str:
    """The lowest loss of every cell as a markdown table."""
    lines = ["| r | budget | widths | losses | lowest at | interior |", "|---|---|---|---|---|---|"]
    for m in analysis.get("minima", ()):
        widths, losses = (", ".join(f"{v:{form}}" for v in m[key]) for key, form in _COLUMNS)
        lines.append(
            f"| {m['r']:g} | {m['budget']:.3g} | {widths} | {losses} | {m['d_model']:g} "
            f"| {'yes' if m['interior'] else 'no'} |"
        )
    return "\n".join(lines)


_COLUMNS = (("d_models", "g"), ("losses", ".4f"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", type=Path, default=None, help="another sweep file")
    parser.add_argument("--jobs", type=int, default=None, help="runs at a time (6 on a GPU, 2 on a CPU)")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="for everything, the fit included (default 10)"
    )
    parser.add_argument("--starts", type=int, default=200, help="of the fit")
    parser.add_argument("--resamples", type=int, default=200, help="of its intervals")
    parser.add_argument(
        "--out", type=Path, default=None, help="folder in which the runs are kept (default: they are not)"
    )
    parser.add_argument("--json", type=Path, default=None, help="file for all figures")
    args = parser.parse_args()
    if args.json is not None and args.json.exists():
        parser.error(f"{args.json} exists; name another file")
    import torch

    on_gpu = torch.cuda.is_available()
    sweep = args.sweep or (GPU_SWEEP if on_gpu else CPU_SWEEP)
    jobs = args.jobs or (6 if on_gpu else 2)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or Path(scratch)
        fresh = not (out / files.load(sweep).name).exists()
        seconds, finished = train(sweep, out, jobs, 60 * args.minutes - SAVING - FITTING)
        left = 60 * args.minutes - (time.perf_counter() - begin)
        records = out / files.load(sweep).name / "records"
        analysis = fit(records, args.starts, args.resamples, left)
        flops = sum(RunRecord.load(path).training_flops for path in sorted(records.glob(f"*{RECORD_SUFFIX}")))
    name = torch.cuda.get_device_name() if on_gpu else "CPU (a tiny grid: its phi means nothing)"
    print(f"{name}; torch {torch.__version__}; {sweep.name}, {jobs} runs at a time\n\n{table(analysis)}\n")
    if not finished:
        print("Not all runs are finished; the fit is that of the others.")
    # Runs that were in --out already were not trained in this time.
    rate = f": {flops / seconds:.3g} FLOP/s" if fresh else ", earlier runs excluded"
    print(
        f"{flops:.3g} FLOPs in finished runs; {seconds:.0f} s, start-up included{rate}; "
        f"with the fit {time.perf_counter() - begin:.0f} s"
    )
    print(phi_line(analysis))
    if args.json:
        figures = {
            "device": name, "torch": torch.__version__, "sweep": sweep.name, "jobs": jobs, "seconds": seconds,
            "finished": finished, "analysis": analysis,
        }  # fmt: skip
        args.json.write_text(json.dumps(figures, indent=1))
        print(f"all figures: {args.json}")
    return int(not finished or "refused" in analysis)


if __name__ == "__main__":
    sys.exit(main())
