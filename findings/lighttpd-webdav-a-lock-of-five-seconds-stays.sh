#!/bin/bash
# lighttpd 1.4.69, mod_webdav (Debian 12): a lock's seconds are added to the hour of the day, so it stays.
#
# Guess: LOCK with "Timeout: Second-5" is answered by a lock of five seconds. If its client dies it is free after that,
#   and meanwhile lockdiscovery says how many seconds are left.
# Seen: the deadline is SQLite's CURRENT_TIME + 5. CURRENT_TIME is a text such as 19:43:37, which counts as 19 in a sum,
#   and what is left is computed in the same way: five, until the hour changes. A lock of 24 seconds or more never ends,
#   one of five takes five hours, in the evening for ever: a dead client's file stays locked until somebody unlocks it.
. "$(dirname "$0")/lib.sh"
apt_unpack lighttpd=1.4.69-1 lighttpd-mod-webdav=1.4.69-1 libnettle8 libpcre2-8-0 libsqlite3-0 libxml2 \
  libicu72 libxxhash0
cd "$work"
port=$(free_ports 1)
mkdir files uploads
cat > lighttpd.conf <<END
server.bind = "127.0.0.1"
server.port = $port
server.document-root = "$work/files"
server.upload-dirs = ("$work/uploads")
server.modules = ("mod_webdav")
webdav.activate = "enable"
webdav.sqlite-db-name = "$work/locks"
END
lighttpd -D -f lighttpd.conf -m debian/usr/lib/lighttpd 2> errors &
wait_for_port "$port"
PORT=$port python3 - > seen 2>&1 <<'END' || true
import http.client, os, re, time
def ask(method, body=None, **headers):
    server = http.client.HTTPConnection("127.0.0.1", int(os.environ["PORT"]))
    server.request(method, "/report", body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = server.getresponse()
    return answer.status, answer.read().decode()
def lock():
    return ask("LOCK", '<?xml version="1.0"?><D:lockinfo xmlns:D="DAV:"><D:lockscope><D:exclusive/></D:lockscope>'
        '<D:locktype><D:write/></D:locktype></D:lockinfo>', Timeout="Second-5", Content_Type="application/xml")
print("PUT:", ask("PUT", "as it was")[0])
status, answer = lock()
print("LOCK:", status, re.search(r"<D:timeout>(.*?)</D:timeout>", answer)[1])
print("another client, at once: PUT", ask("PUT", "newer")[0])
print("the holder has died")
time.sleep(8)
left = re.search(r"<D:timeout>Second-(\d+)</D:timeout>", ask("PROPFIND", Depth="0")[1])
print("eight seconds later, by lockdiscovery: three seconds or more are left:", left is not None and int(left[1]) >= 3)
print("another client: PUT", ask("PUT", "newer")[0], "LOCK", lock()[0])
END
still <<'END'
PUT: 201
LOCK: 200 Second-5
another client, at once: PUT 423
the holder has died
eight seconds later, by lockdiscovery: three seconds or more are left: True
another client: PUT 423 LOCK 423
END
