"""Rehearses CUDA code on a CPU: what a graph freezes, where the host waits, what is out of place.

    python tests/cuda_rehearsal.py leanrl/sac_continuous_action_torchcompile.py --cudagraphs
    python tests/cuda_rehearsal.py --backend aot_eager SCRIPT --compile --cudagraphs
    python tests/cuda_rehearsal.py --accelerator mps leanrl/sac_continuous_action.py --device mps
    python tests/cuda_rehearsal.py -m pytest tests/test_parity.py -m gpu

Tensors "on CUDA" are CPU tensors whose storage carries a mark, which `device`, `is_cuda`, `to` and
`numpy` follow. A dispatch mode sees every operator: it marks results, refuses tensors in different
places, notes where the host waits and, during a capture, records. A replay runs what was recorded
on the same memory; as in a CUDA graph, what Python computed stays as it was. Before some replays
of a CudaGraphModule Python runs once more, and a number, branch or tensor that is not what was
recorded is named with its file and line. torch is changed for the whole process. Of another
accelerator than CUDA only places and waits are rehearsed, and that MPS has no float64.

At the end come lists of waits and problems; the exit status is 1 if there are problems. What a
rehearsal cannot show is listed in .github/CONTRIBUTING.md.
"""

import ctypes
import os
import runpy
import sys
import sysconfig
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product, zip_longest
from types import SimpleNamespace

import torch
import torch._dynamo.convert_frame as frames
import torch.distributed as dist
import torch.utils._triton
from tensordict.nn import CudaGraphModule
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

CPU, DEVICE = torch.device("cpu"), torch.device("cuda", 0)
LIBRARIES = (sysconfig.get_path("stdlib"), os.path.dirname(os.path.dirname(torch.__file__)), "<")
UNWRITTEN = 0xFF  # each byte of a graph's memory before a replay, so that who reads it reads NaN
problems, waits, counts = Counter(), Counter(), Counter()
queued, finished = Counter(), Counter()
reads, writes = [], []  # still to do: (pinned source, value, site), (target on the host, value)


def site() -> str:
    """File and line of the innermost frame that is neither here nor in a library."""
    frame = sys._getframe()
    while frame and frame.f_code.co_filename.startswith((site.__code__.co_filename, *LIBRARIES)):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "?"


def report_problem(text: str, at: str | None = None, fatal: bool = True) -> None:
    text = f"{at or site()}: {text}"
    problems[text] += 1
    if fatal:  # CUDA would raise an error, too
        raise RuntimeError(text)


def place_of(tensor: Tensor) -> str | None:
    """What its storage is marked with: "device", "pinned" or None."""
    try:
        return getattr(tensor.untyped_storage(), "rehearsed_place", None)
    except (NotImplementedError, RuntimeError):  # it has no storage
        return None


def put(tensor: Tensor, place: str | None) -> Tensor:
    tensor.untyped_storage().rehearsed_place = place
    return tensor


def on_device(tensor: Tensor) -> bool:
    return not Rehearsal.tracing and place_of(tensor) == "device"


def is_device(device) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def key_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tensors_in(tree) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def launch() -> None:
    """Accounts for a kernel or a graph that Python asks for."""
    counts["launches"] += 1
    queued["launches"] += 1


def wait(why: str, event: "Event | None" = None) -> None:
    """The host waits until the device has done everything, or what the event has seen queued."""
    event = event or Event().record()
    finished["launches"] = event.launches
    if Graph.current:
        report_problem(f"the host waits during a capture: {why}")
    waits[f"{site()} {why}"] += 1
    counts["waits"] += 1
    with _disable_current_modes():
        for source, expected, at in reads[: event.reads - finished["reads"]]:
            if not torch.equal(source, expected):
                report_problem("pinned memory was overwritten before this copy was over", at, False)
        for target, value in writes[: event.writes - finished["writes"]]:
            target.copy_(value)
    del reads[: event.reads - finished["reads"]], writes[: event.writes - finished["writes"]]
    finished["reads"], finished["writes"] = event.reads, event.writes


class Event:
    """Stands in for torch.cuda.Event."""

    def __init__(self, *_, **__):
        self.launches = self.reads = self.writes = 0  # of the whole run, queued before it

    def record(self, *_) -> "Event":
        self.launches = queued["launches"]
        self.reads = finished["reads"] + len(reads)
        self.writes = finished["writes"] + len(writes)
        return self

    def synchronize(self) -> None:
        if self.launches > finished["launches"]:
            wait("synchronize an event", self)

    def elapsed_time(self, end) -> float:
        return 0.0


def upload(source: Tensor, non_blocking: bool) -> None:
    """Accounts for a copy from the host; memory that is not pinned is staged, so it may change."""
    counts["uploads"] += not Graph.current  # whose copies the host does not ask for
    is_pinned = place_of(source) == "pinned"
    if Graph.current and not (is_pinned and non_blocking):
        report_problem("a copy from the CPU during a capture, but not from pinned memory")
    if Graph.current:
        return
    if is_pinned and non_blocking:
        queue_read(source.detach(), site())
    elif not non_blocking:
        wait("copy to the device")


def queue_read(source: Tensor, at: str) -> None:
    """A copy to the device, for which pinned memory must stay as it is."""
    reads.append((source, source.clone(), at))


def download(target: Tensor, non_blocking: bool) -> None:
    """Accounts for a copy to the host that has been made; the host may not read it yet."""
    counts["downloads"] += not Graph.current
    is_pinned = place_of(target) == "pinned"
    if Graph.current and not (is_pinned and non_blocking):
        report_problem("a copy to the CPU during a capture, but not to pinned memory")
    if Graph.current:
        return
    if not (non_blocking and is_pinned):
        return wait("copy to the host")
    queue_write(target.detach())


def queue_write(target: Tensor) -> None:
    """A copy to the host, whose result nobody may read yet."""
    writes.append((target, target.clone()))
    target.fill_(torch.nan if target.is_floating_point() else 111)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def alias(tensor: Tensor) -> Tensor:
    """The same memory, which the alias does not keep alive, as a graph knows only addresses."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return tensor
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    raw = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(raw, *place)


class Graph:
    """Stands in for torch.cuda.CUDAGraph: operators, recorded to run again on the same memory."""

    current = None

    def __init__(self, *_, **__):
        self.calls, self.signatures = [], []
        self.made, self.outside, self.before = {}, {}, {}  # by the address of a storage
        self.generators, self.replays = {torch.default_generator._cdata}, 0

    def register_generator_state(self, generator) -> None:
        self.generators.add(generator._cdata)

    def replay(self) -> None:
        if Graph.current:
            report_problem("a replay during a capture")
        for reference, at in self.outside.values():
            if reference.expired():
                report_problem("the graph uses memory that has been freed", at)
        self.replays += 1
        counts["replays"] += 1
        launch()
        with _disable_current_modes():
            for call in self.calls:
                call()

    def record(self, name, function, args, kwargs, inputs, written):
        """Calls the operator and keeps what a replay needs."""
        arguments = [self.describe(x) for x in tree_leaves((args, kwargs))]
        self.signatures.append((name, site(), arguments))
        kept_args, kept_kwargs = tree_map(self.keep, (args, kwargs))
        known = set(map(key_of, inputs))
        for tensor in written:
            memory = bytes_of(tensor.untyped_storage())
            if key_of(tensor) not in self.made and key_of(tensor) not in self.before:
                self.before[key_of(tensor)] = memory, memory.clone()
        result = function(*args, **kwargs)
        new = [tensor for tensor in tensors_in(result) if key_of(tensor) not in known]
        self.made |= {key_of(tensor): put(tensor, "device").untyped_storage() for tensor in new}
        places = [self.keep(tensor) for tensor in tensors_in(result)]

        def call():
            results = tensors_in(function(*kept_args, **kept_kwargs))
            for place, tensor in zip(places, results, strict=True):
                if place.data_ptr() != tensor.data_ptr():
                    place.copy_(tensor)

        if written or new:  # not a view
            self.calls.append(call)
        return result

    def record_transfers(self, copies) -> None:
        """Each replay queues them again."""
        for target, source in copies:
            if place_of(source) == "pinned":
                self.calls.append(partial(queue_read, self.keep(source), site()))
            if place_of(target) == "pinned":
                self.calls.append(partial(queue_write, self.keep(target)))

    def keep(self, x):
        """What stands for an argument in a replay."""
        if not isinstance(x, Tensor):
            return x
        if place_of(x) is None:
            return x.detach().clone()  # a number of the CPU, which becomes part of the graph
        if key_of(x) not in self.made and key_of(x) not in self.outside:
            self.outside[key_of(x)] = StorageWeakRef(x.untyped_storage()), site()
        return alias(x)

    def describe(self, x) -> str:
        """An argument in words, the same ones for two captures that do the same."""
        if not isinstance(x, Tensor):
            return "a generator" if isinstance(x, torch._C.Generator) else repr(x)
        if place_of(x) is None:
            return f"{x.tolist()} from the CPU"
        key = key_of(x)
        origin = f"of its own {list(self.made).index(key)}" if key in self.made else f"at {key:x}"
        return f"a tensor {origin} + {x.storage_offset()} {tuple(x.shape)}"

    def compare(self, function) -> None:
        """Calls Python again and reports the first thing that it would do otherwise."""
        again = Graph()
        again.generators = self.generators
        with capture(again):
            function()
        calls = zip_longest(self.signatures, again.signatures, fillvalue=("nothing", "", []))
        for (name, at, before), (other, where, after) in calls:
            changed = [pair for pair in zip(before, after, strict=False) if pair[0] != pair[1]]
            text = f"the graph calls {name}, Python would now call {other} in {where}"
            if (name, at) == (other, where) and changed:
                text = "{} in the graph keeps {}, Python now has {}".format(name, *changed[0])
            if (name, at) != (other, where) or changed:
                self.signatures = []  # once is enough
                return report_problem(text, at, fatal=False)


@contextmanager
def capture(graph: Graph, *_, **__):
    """Stands in for torch.cuda.graph: it computes nothing, so that all is afterwards as before."""
    if Graph.current:
        report_problem("a capture during a capture")
    generator_state, Graph.current = torch.get_rng_state(), graph
    try:
        yield
    finally:
        Graph.current, graph.replays = None, 0
        torch.set_rng_state(generator_state)
        with _disable_current_modes():
            for memory, values in graph.before.values():
                memory.copy_(values)
            for storage in graph.made.values():
                bytes_of(storage).fill_(UNWRITTEN)
        graph.before.clear()


def call_graph_module(call, self, *args, **kwargs):
    """Stands in for CudaGraphModule's call: compares before replays 0, 1, 2, 4, 8 and so on."""
    graph = getattr(self, "graph", None)
    if graph and graph.signatures and graph.replays & (graph.replays - 1) == 0:
        graph.compare(lambda: self.module(*self._args, **self._kwargs))
    return call(self, *args, **kwargs)


WAITING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2"}
NOTHING = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
NOTHING |= {"_unsafe_view", "_local_scalar_dense", "set_", "resize_"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
# results that are where the input is, whatever device is asked for: a change of the type alone, as
# `to` below changes the device, and autograd's memory for a gradient
STAYING = {"aten::_to_copy", "aten::new_empty_strided"}
MIXING = INDEXING | {"copy_", "_foreach_copy_", "_to_copy", "set_"}  # take tensors of the CPU, too


class Rehearsal(TorchDispatchMode):
    """Sees every operator and marks what belongs on the device."""

    tracing = 0

    @classmethod
    def is_infra_mode(cls):  # torch.compile refuses to work in other modes
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if Rehearsal.tracing:
            return function(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        device, place = kwargs.get("device"), None
        if is_device(device):
            place, kwargs["device"] = "device", CPU
        elif kwargs.get("pin_memory"):
            place, kwargs["pin_memory"] = "pinned", False
        elif any(map(on_device, inputs)) and (device is None or function._schema.name in STAYING):
            place = "device"
        if place == "device" or any(map(on_device, inputs)):
            function = partial(call_on_device, function, inputs)
        result = function(*args, **kwargs)
        for tensor in tensors_in(result) if place else ():
            if key_of(tensor) not in map(key_of, inputs):
                put(tensor, place)
            if place == "device" and DEVICE.type == "mps" and tensor.dtype == torch.float64:
                report_problem("MPS has no float64")
        return result


def call_on_device(function, inputs, *args, **kwargs):
    """Calls an operator on the device, after what CUDA would say about it."""
    arguments = function._schema.arguments
    name = function._schema.name.split("::")[1]
    joins = name in ("cat", "stack")  # others take numbers of the CPU, too
    elsewhere = [x for x in inputs if (x.dim() or joins) and not on_device(x)]
    if elsewhere and len(elsewhere) < len(inputs) and name not in MIXING:
        report_problem(f"{name}: expected all tensors to be on the same device")
    generator = getattr(kwargs.get("generator"), "_cdata", None)
    if generator and generator not in Generator.of_device:
        report_problem(f"{name}: expected a generator of CUDA, found one of the CPU")
    if generator and Graph.current and generator not in Graph.current.generators:
        report_problem(f"{name}: the generator is not registered with the graph")
    if name in WAITING:
        wait(name)
    for index in tensors_in(args[1]) if name in INDEXING else ():
        if not on_device(index):
            upload(index, non_blocking=False)
        elif index.dtype == torch.bool:
            wait(f"{name} by a mask")

    bound = {x.name: value for x, value in zip(arguments, args, strict=False)} | kwargs
    copies = ()
    if name in ("copy_", "_foreach_copy_"):
        non_blocking = bound.get("non_blocking", False)
        sources = tensors_in(args[1]) or [torch.tensor(args[1])]  # of a number
        copies = list(zip(tensors_in(args[0]), sources, strict=True))
    for target, source in copies:
        if on_device(target) and not on_device(source):
            upload(source, non_blocking)
    if not Graph.current:
        if not (function.is_view or name in NOTHING):
            launch()
        result = function(*args, **kwargs)
    else:
        written = [x.name for x in arguments if x.alias_info and x.alias_info.is_write]
        written = tensors_in([bound.get(x) for x in written])
        result = Graph.current.record(name, function, args, kwargs, inputs, written)
        Graph.current.record_transfers(copies)
    for target, source in copies:
        if on_device(source) and not on_device(target):
            download(target, non_blocking)
    return result


original = {name: getattr(Tensor, name) for name in ("to", "numpy", "tolist", "__deepcopy__")}
device_of = Tensor.device.__get__


def to(self, *args, copy=False, **kwargs):
    args = [y for x in args for y in ((x.device, x.dtype) if isinstance(x, Tensor) else (x,))]
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    here, dtype = on_device(self), dtype or self.dtype
    there = here if device is None else is_device(device)
    options = {"memory_format": memory_format} if memory_format else {}
    if here == there:
        device = device_of(self) if there or device is None else device
        return original["to"](self, device, dtype, copy=copy, **options)
    result = torch.empty_like(self, dtype=dtype, device=DEVICE if there else CPU, **options)
    if non_blocking and not there:
        put(result, "pinned")  # as PyTorch does
    return result.copy_(self, non_blocking=non_blocking)


def numpy(self, **kwargs):
    if on_device(self):
        report_problem("numpy: the tensor is on CUDA, use .cpu() first")
    return original["numpy"](self, **kwargs)


def tolist(self):
    if on_device(self):
        wait("tolist")
    return original["tolist"](self)


def make_tensor(function, *args, device=None, **kwargs):
    """Stands in for torch.tensor and its like, which no dispatch mode sees."""
    if is_device(device):
        return function(*args, **kwargs).to(device)
    return function(*args, **kwargs if device is None else kwargs | {"device": device})


class Generator(torch.Generator):
    of_device = {torch.default_generator._cdata: None}  # both devices draw from that one

    def __new__(cls, device="cpu"):
        self = super().__new__(cls)
        if is_device(device):
            cls.of_device[self._cdata] = self
        return self


def trace(function, *args, **kwargs):
    """Stands in for Dynamo's tracing, for which tensors are where they are."""
    Rehearsal.tracing += 1
    try:
        return function(*args, **kwargs)
    finally:
        Rehearsal.tracing -= 1


def install(backend: str | None = None, accelerator: str = "cuda") -> None:
    """Changes torch for good; `backend` is torch.compile's, which otherwise compiles nothing."""
    global DEVICE
    DEVICE = torch.device(accelerator, 0)
    Tensor.device = property(lambda self: DEVICE if on_device(self) else device_of(self))
    Tensor.is_cuda = property(lambda self: DEVICE.type == "cuda" and on_device(self))
    Tensor.to, Tensor.numpy, Tensor.tolist = to, numpy, tolist
    Tensor.pin_memory = lambda self: put(self.detach().clone(), "pinned")
    Tensor.cpu = lambda self, **kwargs: to(self, CPU, **kwargs)
    Tensor.cuda = lambda self, *_, **kwargs: to(self, DEVICE, **kwargs)
    copy = original["__deepcopy__"]
    Tensor.__deepcopy__ = lambda self, memo: put(copy(self, memo), place_of(self))
    for name in ("tensor", "as_tensor", "asarray"):
        setattr(torch, name, partial(make_tensor, getattr(torch, name)))
    autocast, real_compile, torch.Generator = torch.autocast, torch.compile, Generator
    torch.autocast = lambda _, *args, **kwargs: autocast("cpu", *args, **kwargs)
    torch.compile = lambda function, **kwargs: function  # Inductor's kernels would run unseen
    if backend:
        torch.compile = lambda *args, **kwargs: real_compile(*args, **kwargs | {"backend": backend})
    frames._compile = partial(trace, frames._compile)

    module = torch.get_device_module(DEVICE)
    module.synchronize = lambda *_: wait("synchronize")
    if accelerator != "cuda":
        module.get_rng_state, module.set_rng_state = torch.get_rng_state, torch.set_rng_state
        return
    torch.utils._triton.has_triton = lambda: False  # it would ask a GPU what it can do
    # builds for CUDA would ask the driver whether a graph is being captured
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda optimizer: None
    cuda = torch.cuda
    for names, value in (
        ("is_available is_initialized", True),
        ("_lazy_init init empty_cache set_device", None),
        ("device_count", 1),
        ("current_device", 0),
        ("utilization", 50),
        ("get_device_name", "rehearsal"),
        ("get_device_capability", (8, 0)),
        ("current_stream Stream", SimpleNamespace(wait_stream=lambda _: None)),
        ("stream device", nullcontext()),
    ):
        for name, module in product(names.split(), (cuda, cuda.random)):
            setattr(module, name, lambda *_, value=value, **__: value)  # Dynamo has rules for each
    cuda.CUDAGraph, cuda.graph, cuda.Event = Graph, capture, Event
    cuda.default_generators = (torch.default_generator,)
    replay, connect = CudaGraphModule.__call__, dist.init_process_group
    CudaGraphModule.__call__ = lambda *args, **kwargs: call_graph_module(replay, *args, **kwargs)
    dist.init_process_group = lambda _, **kwargs: connect("gloo", **kwargs)


def main(command: list[str]) -> None:
    options = {}
    while command and command[0] in ("--backend", "--accelerator"):
        name, value, *command = command
        options[name[2:]] = value
    install(**options)
    is_module = command[0] == "-m"
    sys.argv = command[is_module:]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(command[0]))
    try:
        with Rehearsal():
            run = runpy.run_module if is_module else runpy.run_path
            run(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        for title, found in (("waits", waits), ("PROBLEMS", problems)):
            lines = [f"{count:8}  {text}" for text, count in found.most_common()]
            print(f"[rehearsal] {title}:", *(lines or ["none"]), sep="\n", file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    sys.modules["cuda_rehearsal"] = sys.modules["__main__"]  # for a script that imports it
    main(sys.argv[1:] or sys.exit(__doc__))
