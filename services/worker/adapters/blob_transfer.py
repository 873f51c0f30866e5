"""One state between the engine's memory and a blob; what runs here belongs on a thread beside the engine's."""

import time
from dataclasses import dataclass

from services.blob.encodings import StateEncoding
from services.blob.errors import DamagedBlobError, ForeignBlobError
from services.blob.layout import StateHeader, write_state
from services.blob.planes import Buffer
from services.blob.reader import StateReader
from services.blob.tensors import plane_of, tensor_of
from services.worker.adapters.served_model import ServedModel
from services.worker.engine.transfer import IncomingState, OutgoingState

__all__ = ["LoadedBlob", "load_blob", "write_blob"]


@dataclass(frozen=True, slots=True)
class LoadedBlob:
    """A blob in the engine's memory. seconds: from its opened header to its last plane."""

    num_bytes: int
    seconds: float


def write_blob(served: ServedModel, outgoing: OutgoingState, receipt: bytes) -> list[Buffer]:
    """The blob of a state, in pieces."""
    planes = [
        plane_of(layer, name, tensor)
        for layer in range(len(outgoing.layers))
        for name, tensor in outgoing.read_layer(layer).items()
    ]
    header = StateHeader(
        model_revision=served.revision,
        profile_digest=served.profile_digest,
        token_ids=outgoing.state.token_ids,
        seam_window=outgoing.state.seam_window,
        layers=outgoing.layers,
        encoding=served.profile.encoding.fields,
        receipt=receipt,
    )
    return write_state(header, planes)


def load_blob(served: ServedModel, reader: StateReader, incoming: IncomingState) -> LoadedBlob:
    """Move an opened blob into the room that it is given, layer by layer.

    Raises:
        BlobError: it is damaged, or not of this model, profile and segment.
        OSError: it cannot be read.
    """
    began = time.monotonic()
    header = reader.header
    header.check_origin(served.revision, served.profile_digest)
    header.check_tokens(incoming.token_ids)
    if StateEncoding.from_fields(header.encoding) != served.profile.encoding:
        raise ForeignBlobError(
            f"encoding is {dict(header.encoding)}, not {served.profile.encoding.fields}; computed anew"
        )
    for layer, planes in enumerate(reader.layers()):
        try:
            incoming.write_layer(layer, {plane.name: tensor_of(plane) for plane in planes})
        except ValueError as error:
            raise DamagedBlobError(f"layer {layer}: {error}") from error
    return LoadedBlob(sum(plane.size for plane in header.planes), time.monotonic() - began)
