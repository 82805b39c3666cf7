"""One peer without sockets, clock or threads: its neighbours, its store, what it trains, and what it does next.

    driver (a loop over TLS, a simulator)           one peer
    on_tick(now)  ───────────────────────────────▶  RunningPeer: rounds, waits, commits
    ◀─────────────────────────────── Wait or Work
    receive(caller, messages, now)  ─────────────▶  Session: messages in, messages out
    has_news, calls(neighbour, now)  ────────────▶
                                                    Neighbour: all that is known of one neighbour
                                                    Store: checkpoints and counts, on disk or in memory
                                                    Trainer: private steps, of a scenario or of an app

What always holds: nothing leaves before the checkpoint from which it follows is written, and no private step is taken
before its charge is on disk. Time and messages are arguments, so the same messages at the same moments give the same
run, in a second of real time or of a virtual clock.
"""
