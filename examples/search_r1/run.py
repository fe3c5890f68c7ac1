"""The whole recipe with one command: corpus, index, server, warm-up, reinforcement learning, evaluation, table.

Run: python examples/search_r1/run.py [--recipe two_hop] [--seed 2] [--short]

Every step is a command that can be run by hand (examples/search_r1/README.md shows them); this file only runs them one
after another, with the server beside them, and reads what they measured. Everything goes to --work_dir.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import results
from demonstrations import TOPK
from server_process import serving, write_tools_file

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
MODEL = "bundled/smollm2-135m"
RECIPES: dict[str, dict[str, Any]] = {
    "one_hop": {"two_hop_share": 0.2, "suffix": "", "num_questions": {"one_hop": 160, "two_hop": 40}},
    "two_hop": {"two_hop_share": 0.5, "suffix": "_two_hop", "num_questions": {"one_hop": 100, "two_hop": 100}},
}
NUM_DEMONSTRATIONS = 400
SHORT_RL_ITERATIONS = 4


class Recipe:
    """One run of the recipe.

    Args:
        options: See `main`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.settings = RECIPES[options.recipe]
        self.data_dir: Path = options.data_dir
        self.work_dir: Path = options.work_dir
        self.runs_dir = self.work_dir / "runs"
        self.work_dir.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        self.minutes: dict[str, float] = {}

    def run(self) -> None:
        """Do all steps and print the table."""
        self.prepare()
        arguments = ["--index_path", str(self.data_dir / "flat.index")]
        arguments += ["--corpus_path", str(self.data_dir / "corpus.jsonl"), "--topk", str(TOPK)]
        with serving(arguments, self.work_dir / "server.log") as url:
            write_tools_file(self.work_dir / "tools.yaml", url, TOPK)
            if not self.options.short:
                data = {"train_data": self.files("train"), "val_data": self.files("test", "test_no_tool")}
                self.lit_rl("validate", "untrained", MODEL, data)
            self.lit_rl("fit", "warmup", MODEL, self.warmup_data("check"), warmup=True)
            warm = self.export("warmup", "warmed_up")
            self.lit_rl("fit", "rl", str(warm), self.rl_data(), trainer=self.rl_trainer())
            self.export("rl", "final")
            if not self.options.short:
                self.more_warmup(warm)
        self.report()

    def prepare(self) -> None:
        """Write corpus, index and demonstrations, where they are not there."""
        if not (self.data_dir / "test_no_tool.parquet").exists():
            self.script("corpus.py", "--out_dir", str(self.data_dir))
        corpus, index = self.data_dir / "corpus.jsonl", self.data_dir / "flat.index"
        if not index.exists() or index.stat().st_mtime < corpus.stat().st_mtime:
            self.script("build_index.py", "--corpus_path", str(corpus), "--index_path", str(index))
        self.script(
            "demonstrations.py",
            f"--data_dir={self.data_dir}",
            f"--num={NUM_DEMONSTRATIONS}",
            f"--two_hop_share={self.settings['two_hop_share']}",
            f"--seed={self.options.seed}",
            f"--out_path={self.work_dir / 'demonstrations.jsonl'}",
        )

    def more_warmup(self, warm: Path) -> None:
        """Go on with demonstrations instead of rewards: as many again as 64, from the same start."""
        data = {**self.warmup_data("test"), "steps_per_iteration": 8}
        trainer = {"max_epochs": 1, "callbacks": [{"class_path": "lit_rl.callbacks.IterationCheckpoint"}]}
        self.lit_rl("fit", "more_warmup", str(warm), data, trainer=trainer, warmup=True)

    def files(self, *names: str) -> dict[str, Any]:
        """Return a prompt source over files of the data folder, those of the recipe."""
        suffix = self.settings["suffix"]
        paths = [str(self.data_dir / f"{name}{suffix}.parquet") for name in names]
        return {"class_path": "lit_rl.data.PromptFiles", "init_args": {"files": paths}}

    def warmup_data(self, measured_on: str) -> dict[str, Any]:
        """Return data options of a warm-up."""
        demonstrations = {"files": [str(self.work_dir / "demonstrations.jsonl")]}
        return {
            "train_data": {"class_path": "lit_rl.data.ConversationFiles", "init_args": demonstrations},
            "val_data": self.files(measured_on),
        }

    def rl_data(self) -> dict[str, Any]:
        """Return data options of reinforcement learning."""
        return {"train_data": self.files("train"), "val_data": self.files("test")}

    def rl_trainer(self) -> dict[str, Any]:
        """Return trainer options of reinforcement learning."""
        iterations = self.options.rl_iterations
        if iterations is None and self.options.short:
            iterations = SHORT_RL_ITERATIONS
        return {} if iterations is None else {"max_epochs": iterations, "check_val_every_n_epoch": iterations}

    def lit_rl(
        self,
        command: str,
        name: str,
        model_name: str,
        data: Mapping[str, Any],
        *,
        trainer: Mapping[str, Any] | None = None,
        warmup: bool = False,
    ) -> None:
        """Run ``lit-rl`` on the recipe's configuration with these changes, and note its minutes."""
        seed = self.options.seed
        agents = {"tool_config_path": str(self.work_dir / "tools.yaml")}
        overlay = {
            "model_name": model_name,
            "run_name": name,
            "runs_dir": str(self.runs_dir),
            "seed_everything": seed,
            "data": {"init_args": {**data, "agents": agents, "seed": seed}},
            **({"trainer": dict(trainer)} if trainer else {}),
        }
        path = self.work_dir / f"{name}.yaml"
        path.write_text(json.dumps(overlay, indent=2))
        configs = [CONFIGS / "base/trainer_cpu.yaml", CONFIGS / "search_r1/laptop.yaml"]
        if self.settings["suffix"]:
            configs.append(CONFIGS / "search_r1/laptop_two_hop.yaml")
        if warmup:
            configs.append(CONFIGS / f"search_r1/laptop_warmup{self.settings['suffix']}.yaml")
        arguments = [argument for config in (*configs, path) for argument in ("--config", str(config))]
        self.step(name, [sys.executable, "-m", "lit_rl.cli", command, *arguments])

    def script(self, name: str, *arguments: str) -> None:
        """Run a script of this folder."""
        self.step(name.removesuffix(".py"), [sys.executable, str(HERE / name), *arguments])

    def step(self, name: str, command: list[str]) -> None:
        """Run a command; a failing one ends the recipe with its exit status."""
        print(f"== {name} (minute {(time.monotonic() - self.started) / 60:.1f})", flush=True)
        started = time.monotonic()
        # In the root of the checkout: the configurations name files from there.
        process = subprocess.Popen(command, cwd=HERE.parents[1], env={**os.environ, "TOKENIZERS_PARALLELISM": "false"})
        try:
            status = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        self.minutes[name] = (time.monotonic() - started) / 60
        if status:
            raise SystemExit(f"run: {name} ended with status {status}: {' '.join(command)}")

    def export(self, run_name: str, folder: str) -> Path:
        """Write a run's policy as a Hugging Face folder and return it."""
        out_dir = self.work_dir / folder
        shutil.rmtree(out_dir, ignore_errors=True)
        run = results.newest_run(self.runs_dir, run_name)
        command = [sys.executable, "-m", "lit_rl.cli", "export", "--ckpt_path", str(run), "--out", str(out_dir)]
        self.step(f"export_{run_name}", command)
        return out_dir

    def report(self) -> None:
        """Print the table, and write it and its numbers beside the runs."""
        numbers: dict[str, int] = self.settings["num_questions"]
        last = lambda name: results.validations(results.newest_run(self.runs_dir, name))[-1]  # noqa: E731
        rl = results.validations(results.newest_run(self.runs_dir, "rl"))
        stages: list[tuple[str, dict[str, float], float | None]] = []
        if not self.options.short:
            untrained = last("untrained")
            stages.append(("untrained, without the tool", results.summarise_no_tool(untrained), None))
            stages.append(("untrained, with the tool", results.summarise(untrained, numbers), None))
        stages.append(("warmed up", results.summarise(rl[0], numbers), self.minutes["warmup"]))
        stages.append(("then reinforcement learning", results.summarise(rl[-1], numbers), self.minutes["rl"]))
        if not self.options.short:
            more = results.summarise(last("more_warmup"), numbers)
            stages.append(("instead 64 more demonstrations", more, self.minutes["more_warmup"]))
        text = results.table(stages, sum(numbers.values()))
        total = (time.monotonic() - self.started) / 60
        (self.work_dir / "results.md").write_text(text + "\n")
        summary = {
            "stages": {name: values for name, values, _ in stages},
            "num_questions": numbers,
            "minutes": self.minutes,
            "total": total,
        }
        (self.work_dir / "results.json").write_text(json.dumps(summary, indent=2))
        print(f"\n{text}\n\n{total:.1f} minutes in all. Policy: {self.work_dir / 'final'}", flush=True)


def main() -> None:
    """Run the recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="one_hop")
    parser.add_argument("--seed", type=int, default=1, help="of demonstrations, row order and sampling")
    parser.add_argument("--rl_iterations", type=int, help="of reinforcement learning (default: the recipe's)")
    parser.add_argument("--short", action="store_true", help="few steps and no comparisons: a check of all parts")
    parser.add_argument("--data_dir", type=Path, default=Path("data/search_r1"), help="corpus, index and questions")
    parser.add_argument("--work_dir", type=Path, help="default: runs/search_r1/RECIPE_seedN")
    options = parser.parse_args()
    name = f"{options.recipe}_seed{options.seed}{'_short' if options.short else ''}"
    options.data_dir = options.data_dir.resolve()
    options.work_dir = (options.work_dir or Path("runs/search_r1") / name).resolve()
    # The default action would leave the server and the step running.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    Recipe(options).run()


if __name__ == "__main__":
    main()
