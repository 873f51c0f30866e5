"""Plans past the machines at hand: replays traces on virtual workers, with measured costs and the router's scheduling."""
