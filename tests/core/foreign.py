"""Somebody confined to a namespace of his own, who knows the digests of all others.

He asks for what he likes under any key, as a master lets him: what he asks goes through the
confinement of its service before the core has it. The model is told of his own keys alone, so a
reply about another's object, and any change of one, is a disagreement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mooncake_store.master.clients import Peer
from mooncake_store.master.confined import Confinement
from tests.core.lab import MIB, SECOND, digests_of
from tests.core.rules import Rules, name_of
from tests.core.space import expect
from transfer_engine.errors import AuthError

if TYPE_CHECKING:
    import random

__all__ = ["ForeignRules"]

NOBODYS = 1_000_000
"""The key that the model is told for those he is not shown."""
OWN = range(500_000, 500_040)
QUOTA = MIB


class _Asked(NamedTuple):
    digests: Any


class ForeignRules(Rules):
    """The rules, and a foreign writer among the clients."""

    def __init__(
        self, rng: random.Random, check_every: int = 1, *, wide: bool | None = None
    ) -> None:
        super().__init__(rng, check_every, wide=wide)
        self.known = [*self.known, *OWN]
        self.tenant = self.checked.tenant("foreign", QUOTA)
        self.foreigner = self.checked.open_client(7, 1)
        self._peer = Peer(self.foreigner, self.tenant, confined=True)
        self._confinement = Confinement(self.checked.shard)
        self.rules |= {
            self.settle: 5,
            self.finish: 5,
            self.pry: 8,
            self.hold: 6,
            self.spoil: 8,
            self.carry_off: 3,
        }

    def _shown(self, keys: list[int], begun: str = "") -> list[int]:
        """The keys of a request as the core has them; those of others are nobody's by then."""
        asked = _Asked(digests_of(keys))
        told = self._confinement.narrowed(self._peer, asked, ["digests"], begun, "soak").digests
        hidden = (told != asked.digests).any(axis=1).tolist()
        objects = self.model.objects
        others = [key in objects and objects[key].tenant != self.tenant for key in keys]
        expect(hidden == others, f"of {keys} hidden are {hidden}, others' are {others}")
        return [NOBODYS if away else key for key, away in zip(keys, hidden, strict=True)]

    def _may_not_begin(self, keys: list[int]) -> None:
        try:
            self._shown(keys, begun="digests")
        except AuthError:
            return
        expect(False, f"of {keys} some are others', and all may be begun")

    def _any_keys(self, most: int = 8) -> list[int]:
        """Own keys, and what others have there: leased, being written, at rest."""
        objects = [key for key, item in self.model.objects.items() if item.tenant != self.tenant]
        victims = self.rng.sample(objects, min(len(objects), self.rng.randrange(most)))
        keys = [*victims, *self._leased(2), *self.rng.sample(OWN, self.rng.randrange(4))]
        self.rng.shuffle(keys)
        return keys

    def settle(self) -> None:
        """Put, under own keys and others': a single one of those refuses the whole batch."""
        upsert = self.rng.random() < 0.5
        keys = self.rng.sample(OWN, self.rng.randrange(1, 5))
        if self.rng.random() < 0.4:
            taken = self._any_keys()
            if any(key not in OWN for key in taken):
                self._may_not_begin(taken)
                return
        shown, sizes = self._shown(keys, begun="digests"), self._sizes(keys)
        expect(shown == keys, f"own keys {keys} are not shown")
        options = self._options(keys)
        self.checked.put_start(
            self.foreigner, keys, sizes, options, lambda _: self.tenant, name_of, upsert=upsert
        )

    def finish(self) -> None:
        """Complete or give up own puts, and those of others under their own numbers."""
        keys = self._any_keys()
        writing = [key for key in self.model.objects if self.model.objects[key].writing]
        keys += self.rng.sample(writing, min(len(writing), 4))
        keys = list(dict.fromkeys(keys))
        generations = [
            item.writing.generation if (item := self.model.objects.get(key)) and item.writing else 1
            for key in keys
        ]
        revoke = self.rng.random() < 0.4
        late = revoke and self.rng.random() < 0.5
        shown = self._shown(keys)
        self.checked.put_end(self.foreigner, shown, generations, revoke=revoke, late=late)

    def pry(self) -> None:
        """Ask for all there is, under the longest lease."""
        self.checked.exists(self._shown(self._any_keys()))
        self.checked.get(self.foreigner, self._shown(self._any_keys(12)), 1000 * SECOND)

    def hold(self) -> None:
        """Give back and renew leases of others, more often than they took them."""
        keys = self._any_keys()
        generations = self._generations(keys)
        for _ in range(self.rng.randrange(1, 4)):
            self.checked.release(self.foreigner, self._shown(keys), generations)
        self.checked.renew(self.foreigner, self._shown(keys), generations, 1000 * SECOND)

    def spoil(self) -> None:
        """Remove by force, pin, unpin and make cold."""
        keys, rng = self._any_keys(), self.rng
        chance = rng.randrange(4)
        if chance == 0:
            self.checked.remove(self.foreigner, self._shown(keys), True)
        elif chance == 1:
            self.checked.pin(self._shown(keys), rng.random() < 0.5, rng.choice((None, 0, SECOND)))
        elif chance == 2:
            self.checked.hard_pin(self.foreigner, self._shown(keys), rng.random() < 0.3)
        else:
            self._remove_by_name()

    def _remove_by_name(self) -> None:
        """All that has a name like others' objects, of the own namespace."""
        self.checked.remove_matching(self.foreigner, self.tenant, "model", "prefix", True, 50)

    def carry_off(self) -> None:
        """Rename objects of others to own keys, and own ones over theirs; move their bytes."""
        keys = self._any_keys(4)
        targets = [self.rng.choice(OWN) for _ in keys]
        taken = [key for key in keys if key not in OWN]
        if taken:
            self._may_not_begin(taken)
        names = [name_of(key) for key in targets]
        self.checked.rename(self.foreigner, self._shown(keys), targets, names, True, True)
        (key,) = self._shown([self.rng.choice([*keys, *OWN])])
        self.checked.submit(key, [self.rng.choice(list(self.model.segments))])

    def audit(self) -> None:
        """Compare all there is, his own as well."""
        self.checked.audit(self.known, (0, 1, self.tenant))
