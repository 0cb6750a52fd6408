"""Turns runs of the GPT example into rows for benches/results.

    python3 record_run.py --date 2026-11-22 --commit abc1234 --note "driver 580.159.04" runs/b8 runs/b64

Reads `metrics.jsonl` of each run's folder: the median, least and most of the intervals that begin behind
--after steps, the time until step ten, and the memory that the device's pools reserved. What a run changes
about the model is named behind its shape: --suffix "dropout".
"""

import argparse
import datetime
import json
import statistics
from pathlib import Path


def row(args, folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    run = next(record for record in records if record["kind"] == "run")
    steps = [record for record in records if record["kind"] == "train"]
    speeds = [record["tokens_per_second"] for record in steps if record["step"] > args.after]
    if not speeds:
        raise SystemExit(f"{folder}: no interval behind step {args.after}; train longer, or lower --after")
    settings = run["settings"]
    model, tokens = settings["model"], settings["batch"] * settings["accumulate"] * settings["model"]["context"]
    median = statistics.median(speeds)
    notes = [
        f"{run['parameters'] / 1e6:.1f}M parameters, masters {settings['masters']}, {run['attention']} attention",
        f"{steps[-1]['step']} steps of text; intervals behind step {args.after}",
    ]
    notes += [f"first ten steps {record['seconds']:.1f} s" for record in steps if record["step"] == 10]
    if steps[-1].get("reserved_bytes"):
        notes.append(f"{max(record['reserved_bytes'] for record in steps) / 2**30:.2f} GiB reserved")
    return [
        args.date,
        args.commit,
        "gpt2" if settings["preset"] == "gpt2" else "gpt",
        "step",
        settings["precision"],
        f"B{settings['batch']}T{model['context']}" + (f" {args.suffix}" if args.suffix else ""),
        "blackburn",
        *(f"{1e3 * tokens / speed:.3f}" for speed in (median, max(speeds), min(speeds))),
        f"{median:.0f}",
        "tokens/s",
        "; ".join(notes + ([args.note] if args.note else [])),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--commit", default="-", help="of this repository")
    parser.add_argument("--note", default="", help="driver, machine")
    parser.add_argument("--suffix", default="", help="what stands behind the shape")
    parser.add_argument("--after", type=int, default=20, help="steps that are not counted (%(default)s)")
    args = parser.parse_args()
    for folder in args.folders:
        print(*row(args, folder), sep="\t")


main()
