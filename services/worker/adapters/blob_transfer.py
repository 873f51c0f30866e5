"""One state between the engine's memory and a blob; what runs here belongs on a thread beside the engine's."""

from collections.abc import Sequence

from services.blob.encodings import StateEncoding
from services.blob.errors import DamagedBlobError, ForeignBlobError
from services.blob.layout import StateHeader, write_state
from services.blob.planes import Buffer, Plane
from services.blob.tensors import plane_of, tensor_of
from services.worker.adapters.served_model import ServedModel
from services.worker.engine.transfer import IncomingState, OutgoingState

__all__ = ["check_blob", "outgoing_header", "read_outgoing", "write_blob", "write_incoming"]


def write_blob(served: ServedModel, outgoing: OutgoingState, receipt: bytes) -> list[Buffer]:
    """The blob of a state, in pieces."""
    planes = [plane for layer in range(len(outgoing.layers)) for plane in read_outgoing(outgoing, layer)]
    return write_state(outgoing_header(served, outgoing, receipt), planes)


def outgoing_header(served: ServedModel, outgoing: OutgoingState, receipt: bytes) -> StateHeader:
    """What a blob of a state says of itself, without its planes."""
    return StateHeader(
        model_revision=served.revision,
        profile_digest=served.profile_digest,
        token_ids=outgoing.state.token_ids,
        seam_window=outgoing.state.seam_window,
        layers=outgoing.layers,
        encoding=served.profile.encoding.fields,
        receipt=receipt,
    )


def read_outgoing(outgoing: OutgoingState, layer: int) -> list[Plane]:
    """The planes of one layer."""
    return [plane_of(layer, name, tensor) for name, tensor in outgoing.read_layer(layer).items()]


def write_incoming(incoming: IncomingState, layer: int, planes: Sequence[Plane]) -> None:
    """Move one layer's planes into the room that is given.

    Raises:
        DamagedBlobError: a plane is missing or of another shape.
    """
    try:
        incoming.write_layer(layer, {plane.name: tensor_of(plane) for plane in planes})
    except ValueError as error:
        raise DamagedBlobError(f"layer {layer}: {error}") from error


def check_blob(served: ServedModel, header: StateHeader, token_ids: Sequence[int]) -> None:
    """Refuse a state that is not to be used here for these tokens.

    Raises:
        ForeignBlobError: it is of another model, profile or segment.
    """
    header.check_origin(served.revision, served.profile_digest)
    header.check_tokens(token_ids)
    if StateEncoding.from_fields(header.encoding) != served.profile.encoding:
        raise ForeignBlobError(
            f"encoding is {dict(header.encoding)}, not {served.profile.encoding.fields}; computed anew"
        )
