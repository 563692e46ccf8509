"""The child's side of `measure.worker`: it holds one model at a time and answers one request after the other."""

import gc
import json
import os
import queue
import sys
import threading
import uuid

import numpy
import torch

from kvlab import models, weights
from kvlab.measure import decoding, machine, memory
from kvlab.models import ModelSource


class Session:
    """One process's model, its attention kernel changed in place where that works."""

    def __init__(self, source: dict | None, dtype: str, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._source, self._dtype, self._device = source and ModelSource(**source), dtype, device
        self._model, self._attention = None, None
        self._process = uuid.uuid4().hex  # tells a record's process apart from others

    def answer(self, request: dict) -> dict:
        """Answer one request; whatever goes wrong here is this request's failure and no other's."""
        try:
            return self._answer(**request)
        except Exception as error:  # the process's border: the parent makes a record of it
            status, reason = decoding.failure(error)
            return {"status": status, "error": reason}

    def _answer(self, ask: str, point: dict, entropy: list[int] | None = None, forked: bool = False) -> dict:
        if ask == "measure_ceiling":
            vocabulary = models.outline(self._source).vocab_size if self._source else None
            return {"records": [machine.measure(point, vocabulary) | {"process": self._process}]}
        whole = self._loaded(point["attention"])
        if ask == "measure_memory" and not forked and self._device == "cpu" and sys.platform == "linux":
            again = {"ask": ask, "point": point, "entropy": entropy, "forked": True}
            return memory.in_a_fork(lambda: self.answer(again))
        if ask == "measure_memory":
            torch.set_num_threads(point["threads"])
        with weights.first_layers(whole, point.get("layers")) as model:
            measure = getattr(decoding, "measure_pair" if ask == "measure_memory" else ask)
            found = measure(model, point, numpy.random.default_rng(entropy))
        known = {"process": self._process, "model_files": weights.file_hashes(self._source)} | self._stored
        return {"records": [record | known for record in (found if isinstance(found, list) else [found])]}

    def _loaded(self, attention: str) -> torch.nn.Module:
        held = self._model is not None
        if not held or attention != self._attention and not weights.switch_attention(self._model, attention):
            self._model = None  # two copies of the weights may not fit
            self._model = weights.load(self._source, self._dtype, self._device, attention)
            self._stored = weights.stored(self._source)
            gc.freeze()  # what is there now stays: collecting garbage in the middle of a step stays cheap
        self._attention = attention
        return self._model


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    requests: queue.Queue = queue.Queue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    session = Session(**json.loads(sys.argv[1]))
    while True:
        answers.write(json.dumps(session.answer(requests.get())) + "\n")
        answers.flush()


def _read_requests(requests: queue.Queue) -> None:
    """Pass requests on; when the pipe closes, the parent is gone, however it died, and so are we."""
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main()
