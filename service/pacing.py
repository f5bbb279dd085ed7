"""Admission credits: how many more groups may be started now, so that none comes to exceed the lag.

    credits = (max_policy_lag + 1) x G - outstanding

G is the number of groups that a step takes at least; outstanding are the groups that were started
and are not in a finished step: reserved, collecting, complete, planned and delivered. The bound and
its proof are docs/adr/0001-pacing.md. Without `eligibility.max_policy_lag` there is no bound, and
the credits are None.

A reservation holds credits until the token that made it opens so many groups, or it expires. Event
loop only; what it asks of the buffer and the pump are small numbers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Pacing"]


@dataclass(slots=True)
class Lease:
    token: str
    groups: int  # not opened yet
    until: float  # seconds of the clock


class Pacing:
    """`outstanding`: groups opened and not in a finished step; `a_step`: groups a step takes."""

    def __init__(
        self,
        *,
        max_lag: int | None,
        lease_s: float,
        outstanding: Callable[[], int],
        a_step: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_lag, self._lease_s = max_lag, lease_s
        self._outstanding, self._a_step, self._clock = outstanding, a_step, clock
        self._leases: deque[Lease] = deque()

    def credits(self) -> int | None:
        """Groups that may be started now; None where any number may."""
        if self._max_lag is None:
            return None
        self._expire()
        window = (self._max_lag + 1) * self._a_step()
        return max(0, window - self._outstanding() - self.reserved)

    def reserve(self, groups: int, token: str) -> bool:
        """Hold credits for `groups` groups; False, and none held, where there are fewer."""
        left = self.credits()
        if left is not None and groups > left:
            return False
        if left is not None:
            self._leases.append(Lease(token, groups, self._clock() + self._lease_s))
        return True

    def opened(self, groups: int, token: str) -> None:
        """The token has opened groups: they were reserved, if it had reservations."""
        for lease in self._leases:
            if lease.token == token and groups:
                used = min(groups, lease.groups)
                lease.groups -= used
                groups -= used

    @property
    def reserved(self) -> int:
        """Groups that are reserved and not opened yet."""
        return sum(lease.groups for lease in self._leases)

    def _expire(self) -> None:
        now = self._clock()
        while self._leases and (not self._leases[0].groups or self._leases[0].until <= now):
            self._leases.popleft()
