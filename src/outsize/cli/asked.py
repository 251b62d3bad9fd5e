"""What a command line of `outsize train` comes to, for a new run or for one that is resumed."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outsize.cli import corpus, models
from outsize.cli.folder import RunFolder
from outsize.cli.job import Job
from outsize.cli.metrics import human


@dataclass(frozen=True)
class Asked:
    """The job, the run's folder, and where the run is resumed, from what."""

    job: Job
    folder: RunFolder
    checkpoint: Path | None = None
    source: RunFolder | None = None
    """The run that the checkpoint is of: another one where --name says so."""

    @property
    def has_tokens(self) -> bool:
        """Whether the run goes on with the tokens that it has learnt from, whatever has become of its text."""
        if self.source is None or not self.source.options.exists():
            return False
        return corpus.TokenFiles.within(self.source.corpus).stamp.exists()

    @staticmethod
    def of(args: argparse.Namespace) -> Asked:
        """Raises `ValueError` where the options cannot be those of the run that is resumed."""
        wanted = Job.parse(args)
        folder = RunFolder.choose(wanted)
        if wanted.resume is None:
            return Asked(wanted, folder)
        checkpoint = folder.to_resume(wanted.resume)
        source = RunFolder.of(checkpoint)
        if source is not None and source.path.absolute() == folder.path.absolute():
            source = folder
        elif folder.metrics.exists():
            raise ValueError(f"{folder.path} holds another run than {checkpoint} is of; choose another --name")
        if source is None:
            return Asked(wanted, folder, checkpoint)
        return Asked(wanted.resumed(args.words, source.read_options(), source.name), folder, checkpoint, source)

    def documents(self) -> list[corpus.Document]:
        """What the run is to learn from; nothing where its tokens are there."""
        if self.has_tokens:
            return []
        return corpus.text_files(self.job.text) if self.job.text else corpus.standard_library()

    def tokens(self, documents: list[corpus.Document], config: Any) -> corpus.TokenFiles:
        """Those of the documents, or those that the run that is resumed has learnt from."""
        if self.source is not None and self.has_tokens:
            if self.source != self.folder:
                shutil.copytree(self.source.corpus, self.folder.corpus, dirs_exist_ok=True)
            return corpus.TokenFiles.within(self.folder.corpus)
        parts = corpus.split(documents)
        size = human(parts.train_bytes)
        print(f"text: {len(parts.train)} documents, {size}; {len(parts.held_out)} more are held out", flush=True)
        tokenizer, keep = models.given_tokenizer(self.job.model), self.checkpoint is not None
        return corpus.prepare_tokens(parts, self.folder.corpus, tokenizer, config.vocab_size, keep)
