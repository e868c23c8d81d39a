"""The Conductor: where requests run, whether they are taken, what happens when a worker fails."""
