"""The error tree of the worker; `adapters/messages.py` maps it once to the errors that cross the wire.

WorkerError
├── CheckpointError          the checkpoint directory cannot be served
├── ProfileError             the profile cannot be used
├── CalibrationError         the calibration card cannot be used
├── SplitError               the model cannot be split over so many ranks
├── RankError                the ranks of a group are no longer alike, or one is gone
├── TierError                a tier below the engine's memory cannot be opened
├── UnseenMemoryError        another worker's shared memory cannot be mapped here
├── NoRoomError              a pool cannot give what was asked for now
└── EngineError              a request failed in the engine
    ├── EngineFullError      the waiting line is full
    ├── NotServedError       this engine does not do what is asked
    └── PromptTooLargeError  the prompt can never be served

Each is defined beside what raises it.
"""

__all__ = ["WorkerError"]


class WorkerError(Exception):
    """The root of the worker's errors."""
