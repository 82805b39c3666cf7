"""A covering array over everything that a scenario can choose: `python -m tools.battery`.

Each row is a tiny run, 4 peers and 4 rounds. It is refused in one line whose remedy, followed automatically, works; or
it runs and obeys the laws of `laws`.
"""
