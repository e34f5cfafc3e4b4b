#!/bin/sh
# HAProxy as Ray Serve starts it: `ray_haproxy.sh -db -f CONFIGURATION ...`.
# Ray binds two ports of statistics to all interfaces; this binds them to the loopback interface.
# HAProxy ends with the process that has started it, also if that is killed. Without splicing (-dS),
# it notices every client that disconnects; it misses those whose body it has spliced.
set -eu
sed -i -E 's/^( *bind )\*?:([0-9]+)$/\1127.0.0.1:\2/' "$3"
exec setpriv --pdeathsig KILL "${RAY_HAPROXY:-haproxy}" -dS "$@"
