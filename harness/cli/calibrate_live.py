"""``calibrate --base-url``: probe, scout, plan anew, run; what was measured is then fitted as a finished run is."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from calibration.calibration_file import Calibration, DeploymentRecord
    from calibration.design import DesignedStage, Wish
    from calibration.factors import FactorSet
    from calibration.serving import Serving
    from harness.calibrating import Told
    from harness.export.prometheus import Exporter
    from harness.load.options import RampOptions
    from harness.observe.probe import ProbeResult

_SCOUT_SEED = 1_000_003


class Live:
    """Probe, scout, plan anew, run. ``folder`` is the run's; the scout's lies in it.

    Args:
        prometheus: address and port of the export of all of it; None: none.
        options: of both runs, as ``RampOptions`` has them.
    """

    def __init__(
        self,
        *,
        base_url: str,
        wish: Wish,
        told: Told,
        out: Path | None,
        seed: int,
        endpoint: str,
        quiet: bool,
        processes: str,
        prometheus: tuple[str, int] | None,
        options: dict[str, Any],
    ) -> None:
        from harness.cli.display import Display
        from harness.cli.ramp import default_folder

        self._base_url, self._wish, self._told, self._seed = base_url, wish, told, seed
        self._endpoint, self._quiet, self._processes, self._options = endpoint, quiet, processes, options
        self._screen = Display(stderr=True, highlight=False, quiet=quiet)
        self.folder = out or default_folder("calibrate")
        self._record: DeploymentRecord | None = None
        self._prometheus = prometheus
        self._exporter: Exporter | None = None

    @contextmanager
    def exported(self) -> Iterator[None]:
        """Exports what is measured and fitted inside the block as one, where that was asked for.

        Raises:
            UsageError: the port is in use, or cannot be bound.
        """
        if self._prometheus is None:
            yield
            return
        from harness.export.prometheus import Exporter

        address, port = self._prometheus
        with Exporter(address=address, port=port) as self._exporter:
            yield

    def wait_for_a_read(self) -> None:
        """Keep what was found up until it has been scraped once, where somebody scrapes."""
        if self._exporter is not None:
            self._exporter.wait_for_a_read()

    def measure(self) -> None:
        """Run the stages.

        Raises:
            HarnessError, CalibrationError: nothing could be measured, or the run ended early.
        """
        from calibration.calibrate import prior_of
        from calibration.design import design, scout
        from calibration.serving import serving
        from harness.calibrating import record_of
        from harness.clock import now_ns

        if (self.folder / "run.json").exists():
            raise UsageError(f"{self.folder} holds another run (run.json)", "give --out another folder")
        begun_ns = now_ns()
        self._record = record_of(self._probe(), self._told)
        served = serving(self._record.rebuild())
        self._say_deployment(self._record)
        prior = prior_of(served.deployment, served)
        first = scout(served, prior, self._wish)
        self._say(
            f"first {len(first)} short stages to see how fast it is, then stages for the rest of {self._wish.budget_s:.0f} s"
        )
        # other prompts than the run's: the server may still hold what it computed of them
        self._run("calibrate-scout", first, self.folder / "scout", self._seed + _SCOUT_SEED)
        factors = self._scouted(served, prior)
        if self._exporter is not None:
            self._exporter.on_calibration(factors)
        left_s = max(1.0, self._wish.budget_s - (now_ns() - begun_ns) / 1e9)
        from dataclasses import replace

        plan = design(served, factors, replace(self._wish, budget_s=left_s))
        self._say(
            f"\n{len(plan.stages)} stages, about {plan.seconds:.0f} s; they narrow what is predicted from "
            f"{plan.spread_before:.0%} to {plan.spread_after:.1%}, by what is known now"
        )
        from harness.cli.calibrate_view import design_table

        self._screen.print(design_table(plan.stages))
        self._run("calibrate", plan.stages, self.folder, self._seed)

    def folder_has_stages(self) -> bool:
        return (self.folder / "summary.json").is_file()

    def fit(self) -> tuple[Calibration, Path]:
        """The calibration of what was measured, and where it belongs."""
        from harness.calibrating import calibrate_runs, read_runs

        assert self._record is not None, "measured before it is fitted"
        found = calibrate_runs(self._record, read_runs([self.folder]))
        if self._exporter is not None:
            self._exporter.on_calibration(found.factors)
        return found, self.folder / "calibration.json"

    def _probe(self) -> ProbeResult:
        import asyncio

        from harness.http_get import Getter
        from harness.observe.probe import probe

        options = self._options

        async def ask() -> ProbeResult:
            async with Getter(
                api_key=options["api_key"], key_url=self._base_url, verify_tls=options["verify_tls"]
            ) as getter:
                return await probe(getter, self._base_url, model=options["model"], metrics_url=options["metrics_url"])

        return asyncio.run(ask())

    def _say(self, text: str) -> None:
        self._screen.print(text, markup=False, soft_wrap=True)

    def _say_deployment(self, record: DeploymentRecord) -> None:
        from calibration.calibration_file import UNKNOWN_GPU

        gpu = "an unknown GPU (--gpu narrows the priors)" if record.gpu == UNKNOWN_GPU.name else record.gpu or "CPU"
        plain = record.plain
        self._say(
            f"{record.served_model} on {gpu}, vLLM {plain['vllm_version']}: max_num_seqs {plain['max_num_seqs']}, "
            f"max_num_batched_tokens {plain['max_num_batched_tokens']}, {plain['num_gpu_blocks_override']} blocks"
        )

    def _scouted(self, served: Serving, prior: FactorSet) -> FactorSet:
        """What the scout's stages make of the prior; the prior where they tell nothing."""
        from calibration.calibrate import read_run_stages
        from calibration.errors import NotIdentifiable
        from calibration.fit import Scatter, fit
        from harness.calibrating import finished_run, read_runs

        run = finished_run(read_runs([self.folder / "scout"])[0], is_scout=True)
        readings = read_run_stages(served.deployment, served, run)
        try:
            # a few requests each, not settled: not worth more than a tenth
            rough = Scatter(tpot=0.1, ttft=0.2, weight=8.0)
            return fit(served, prior, [r.observation for r in readings if r.observation is not None], rough).factors
        except NotIdentifiable as error:
            self._screen.print(
                f"the short stages tell too little ({error.message}): planned by the priors", style="yellow"
            )
            return prior

    def _run(self, name: str, stages: Sequence[DesignedStage], folder: Path, seed: int) -> None:
        import asyncio

        from harness.cli.display import Display
        from harness.cli.live import LiveView, QuietView
        from harness.load.run import Run

        view: LiveView | QuietView = QuietView() if self._quiet else LiveView(Display(stderr=True))
        try:
            asyncio.run(Run(self._ramp_options(name, stages, folder, seed), view, self._exporter).execute())
        finally:
            view.close()

    def _ramp_options(self, name: str, stages: Sequence[DesignedStage], folder: Path, seed: int) -> RampOptions:
        from harness.calibrating import profile_of
        from harness.cli.ramp import processes_for
        from harness.load.options import RampOptions

        longest_s = max(stage.expected_s for stage in stages)
        return RampOptions(
            base_url=self._base_url,
            profile=profile_of(name, stages, self._endpoint),
            out=folder,
            seed=seed,
            processes=processes_for(self._processes, max(stage.users for stage in stages)),
            grace_s=max(10.0, longest_s),
            **self._options,
        )
