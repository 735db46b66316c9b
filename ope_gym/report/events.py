"""Write TensorBoard event files through TensorBoard's own protocol buffers, without torch.

`EventLog` is one run: a folder of our own, or the run of a torch `SummaryWriter`. The functions
below it make the summaries of the standard pages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from tensorboard.compat.proto import event_pb2
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer import event_file_writer

from ope_gym.arguments import whole

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    Destination: TypeAlias = str | os.PathLike[str] | SummaryWriter

_FLUSH_SECONDS = 10  # seen while training goes on
_KEPT, _DENSE = 10, 100  # documents of a tag that TensorBoard keeps; one of every n / 100 stays


class Closing:
    """Close at the end of a `with` block."""

    def close(self) -> None:
        """Write what is left."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EventLog:
    """Append summaries to one run.

    Args:
        destination: Folder of the run; or a `SummaryWriter` of the training loop, which is then
            written to and left open.
    """

    def __init__(self, destination: Destination) -> None:
        self._writer: Any
        self.folder: str | None = None  # where it is our own
        if isinstance(destination, str | os.PathLike):
            self.folder = os.fspath(destination)
            # by its module: loggers that follow TensorBoard put their own class there
            self._writer = event_file_writer.EventFileWriter(self.folder, flush_secs=_FLUSH_SECONDS)
        elif hasattr(destination, "_get_file_writer"):
            self._writer = destination
        else:
            raise TypeError(
                f"logdir is a {type(destination).__name__}; give the folder of the run, or a "
                "torch.utils.tensorboard.SummaryWriter"
            )

    def add(self, summary: Summary, step: int) -> None:
        """Write a summary of this step."""
        step = whole("step", step, 0)
        if self.folder is None:
            self._writer._get_file_writer().add_summary(summary, step)
            return
        event = event_pb2.Event(wall_time=time.time(), step=step, summary=summary)
        self._writer.add_event(event)

    def flush(self) -> None:
        """Write what is in the queue to the disk."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is left; flush, and do not close, a `SummaryWriter` that was handed in."""
        if self.folder is None:
            self._writer.flush()
        else:
            self._writer.close()


class Documents:
    """Write documents of a plugin so that TensorBoard keeps enough of them.

    TensorBoard keeps ten tensors of a tag, drawn at random, and always the last one. So documents
    that are to stay have a new tag every ten. All of the first two hundred stay, then one of every
    n / 100: any step has a document within one per cent of those so far, and memory is bounded.

    Args:
        log: Run to write to.
        folder: First part of the tags.
        plugin: Name of the plugin that reads them.
    """

    def __init__(self, log: EventLog, folder: str, plugin: str) -> None:
        self._log, self._folder, self._plugin = log, folder, plugin
        self._written = self._kept = self._next = 0  # and the next one that is to stay

    def add(self, content: bytes, step: int, *, about: bytes = b"") -> None:
        """Write the next document; `about` is listed with its tag, without reading documents."""
        tag = f"{self._folder}/latest"
        if self._written >= self._next:
            tag = f"{self._folder}/{self._kept // _KEPT}"
            self._kept += 1
            self._next = self._written + max(1, self._written // _DENSE)
        self._written += 1
        self._log.add(document(tag, content, self._plugin, about), step)


def scalars(numbers: Mapping[str, float]) -> Summary:
    """Return numbers by tag."""
    return Summary(value=[Summary.Value(tag=tag, simple_value=n) for tag, n in numbers.items()])


def text(tag: str, markdown: str) -> Summary:
    """Return Markdown for the Text page."""
    return text_pb(tag, markdown)


def document(tag: str, content: bytes, plugin: str, about: bytes = b"") -> Summary:
    """Return the bytes of a document for a plugin of one's own, with a note about its tag."""
    return _tensor(tag, content, plugin, data_class=DATA_CLASS_TENSOR, about=about)


def layout(bands: Mapping[str, str], lines: Mapping[str, Sequence[str]]) -> Summary:
    """Return the charts of the Custom Scalars page, by title.

    Bands have a category of their own: within one, TensorBoard shows them after the lines.

    Args:
        bands: Folder of the tags `value`, `low` and `high`.
        lines: Regular expressions of tags.
    """
    page = layout_pb2.Layout()
    first, more = (page.category.add(title=title) for title in ("Value of the policy", "More"))
    for title, folder in bands.items():
        band = first.chart.add(title=title).margin.series.add(value=f"{folder}/value")
        band.lower, band.upper = f"{folder}/low", f"{folder}/high"
    for title, tags in lines.items():
        more.chart.add(title=title).multiline.tag.extend(tags)
    return _tensor("custom_scalars__config__", page.SerializeToString(), "custom_scalars", shape=())


def hparams(
    settings: Mapping[str, bool | int | float | str], metrics: Sequence[str]
) -> list[Summary]:
    """Return what the HParams page wants: the settings, and the tags of the scalars beside them."""
    kinds = {bool: ("BOOL", "bool_value"), str: ("STRING", "string_value")}
    start = plugin_data_pb2.SessionStartInfo()
    infos = []
    for key, value in settings.items():
        kind, attribute = kinds.get(type(value), ("FLOAT64", "number_value"))
        number = api_pb2.DataType.Value(f"DATA_TYPE_{kind}")
        infos.append(api_pb2.HParamInfo(name=key, type=number))
        setattr(start.hparams[key], attribute, value)
    shown = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in metrics]
    experiment = api_pb2.Experiment(hparam_infos=infos, metric_infos=shown)
    end = plugin_data_pb2.SessionEndInfo(status=api_pb2.Status.Value("STATUS_SUCCESS"))
    parts: dict[str, dict[str, Any]] = {
        "experiment": {"experiment": experiment},
        "session_start_info": {"session_start_info": start},
        "session_end_info": {"session_end_info": end},
    }
    summaries = []
    for name, part in parts.items():
        content = plugin_data_pb2.HParamsPluginData(version=0, **part).SerializeToString()
        data = SummaryMetadata.PluginData(plugin_name="hparams", content=content)
        value = Summary.Value(tag=f"_hparams_/{name}", metadata=SummaryMetadata(plugin_data=data))
        summaries.append(Summary(value=[value]))
    return summaries


def _tensor(
    tag: str,
    content: bytes,
    plugin: str,
    *,
    shape: tuple[int, ...] = (1,),
    data_class: int = 0,
    about: bytes = b"",
) -> Summary:
    """Return a string as a tensor of a plugin; `about` is the data that the plugin asks for."""
    data = SummaryMetadata.PluginData(plugin_name=plugin, content=about)
    sizes = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in shape])
    tensor = TensorProto(dtype="DT_STRING", string_val=[content], tensor_shape=sizes)
    metadata = SummaryMetadata(plugin_data=data, data_class=data_class)
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])
