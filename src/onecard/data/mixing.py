"""How often each source is passed over in an epoch, so that it makes up a given share of the tokens."""

from __future__ import annotations

from collections.abc import Mapping

from onecard.errors import ConfigError


def passes(shares: Mapping[str, float], tokens: Mapping[str, int]) -> dict[str, float]:
    """Passes over each source in an epoch that has as many tokens as all sources together.

    `shares`: of the tokens of an epoch, by source; those not named share the rest as they would without it. `tokens`:
    of each source. ConfigError for shares of more than 1 in all, for less than 1 if no source is left for the rest, and
    for a share of a source without tokens.
    """
    given = sum(shares.values())
    rest = 1 - given
    if rest < -1e-9:
        raise ConfigError(f"mix_shares come to {given:.3g} in all.", "Shares are at most 1 in all.")
    empty = [name for name, share in shares.items() if share > 0 and not tokens[name]]
    if empty:
        raise ConfigError(f"mix_shares names {empty[0]}, which has no tokens to train on.", "Leave it out.")
    total = sum(tokens.values())
    others = sum(count for name, count in tokens.items() if name not in shares)
    if rest > 1e-9 and not others:
        raise ConfigError(
            f"mix_shares come to {given:.3g}, and no other source is there for the rest.", "Let them come to 1."
        )
    made: dict[str, float] = {}
    for name, count in tokens.items():
        if name in shares:
            made[name] = shares[name] * total / count if count else 0.0
        else:
            made[name] = max(rest, 0.0) * total / others if others else 0.0
    return made
