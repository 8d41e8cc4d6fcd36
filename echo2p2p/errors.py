"""Every error that echo2p2p raises on purpose.

::

    Echo2p2pError                 exit code 1
    ├── SettingsError             3   a setting is unknown, missing or out of bounds
    │   └── Contradiction             settings are each allowed, but not together
    ├── SwarmError
    │   ├── JoinError             4   no bootstrap peer answered, or the clock is off
    │   ├── PeerUnreachable           a peer cannot be dialled, or its stream broke
    │   │   └── NotSpoken             it can be dialled, and does not speak the protocol
    │   ├── DeadlineExceeded          a wait ran out; says what was waited for, and from whom
    │   └── ProtocolError             a peer sent something that is not our protocol
    │       ├── MessageTooLarge
    │       ├── IncompatibleVersion  6   a peer speaks another version of the protocol
    │       └── TurnedAway            the learner refuses this worker for good
    ├── VerificationError         5   something is not what its owner signed for
    │   ├── RecordError
    │   ├── ManifestError
    │   ├── ChunkError
    │   ├── PatchError                a patch is damaged, or starts from another snapshot
    │   ├── UnsoundWeights            weights are not finite, or changed too much to be published
    │   └── FingerprintMismatch
    ├── ResourceError             7
    │   ├── OutOfDisk
    │   │   └── StoreFull             the chunk store may take no more, however much room the disk has
    │   └── OutOfMemory
    ├── BudgetSpent               8   provisioning.budget_usd is used up
    ├── EngineError                   the inference engine could not generate or install
    │   └── Interrupted               what it was generating is lost; the same prompts may be tried again
    ├── EngineLost                9   its processes end again and again
    └── TaskError                     a task raised where it must not
        └── RewardFailed              a reward of somebody's own raised, died or took too long

The message says what happened and with which value; ``hint`` says what to do about it.
The command line prints both in one line and leaves with ``exit_code``.
"""

from __future__ import annotations


class Echo2p2pError(Exception):
    """Base of the tree.

    Args:
        message: what happened, with the value, the peer or the version concerned.
        hint: what the reader can do about it; may be empty.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class SettingsError(Echo2p2pError):
    exit_code = 3


class Contradiction(SettingsError, ValueError):  # noqa: N818 - pydantic collects ValueErrors
    """Names the settings concerned as well, such as learner.kappa."""

    def __init__(self, message: str, *, hint: str = "", names: tuple[str, ...]) -> None:
        super().__init__(message, hint=hint)
        self.names = names


class SwarmError(Echo2p2pError):
    pass


class JoinError(SwarmError):
    exit_code = 4


class PeerUnreachable(SwarmError):  # noqa: N818 - reads as the state it reports
    pass


class NotSpoken(PeerUnreachable):
    pass


class DeadlineExceeded(SwarmError):  # noqa: N818
    pass


class ProtocolError(SwarmError):
    pass


class MessageTooLarge(ProtocolError):  # noqa: N818
    pass


class IncompatibleVersion(ProtocolError):  # noqa: N818
    exit_code = 6


class TurnedAway(ProtocolError):  # noqa: N818
    pass


class VerificationError(Echo2p2pError):
    exit_code = 5


class RecordError(VerificationError):
    pass


class ManifestError(VerificationError):
    pass


class ChunkError(VerificationError):
    pass


class PatchError(VerificationError):
    pass


class UnsoundWeights(VerificationError):  # noqa: N818
    pass


class FingerprintMismatch(VerificationError):  # noqa: N818
    pass


class ResourceError(Echo2p2pError):
    exit_code = 7


class OutOfDisk(ResourceError):  # noqa: N818
    pass


class StoreFull(OutOfDisk):
    pass


class OutOfMemory(ResourceError):  # noqa: N818
    pass


class BudgetSpent(Echo2p2pError):  # noqa: N818
    exit_code = 8


class EngineError(Echo2p2pError):
    pass


class Interrupted(EngineError):  # noqa: N818 - reads as the state it reports
    pass


class EngineLost(Echo2p2pError):  # noqa: N818
    exit_code = 9


class TaskError(Echo2p2pError):
    pass


class RewardFailed(TaskError):  # noqa: N818
    pass
