"""Guards between a socket and the endpoints: keys, hosts, limits of size, time and number, and a bound on the log.

Nothing here knows what a request asks for. Start with `connection.py`, the middleware.
"""
