#!/bin/bash
# nginx-dav-ext-module 3.0.0 (WebDAV locks for nginx, Debian 12): a lock's old token passes once the next holder left.
#
# Guess: a PUT with "If: (<token>)" is done if the file is locked by that token, and refused by 412 otherwise, as the
#   standard has it. So a client that was too slow for its lock cannot write over what came after it.
# Seen: the token is looked at only while there is a lock. As long as the next client has it, the late one gets its 412;
#   as soon as that one has unlocked, the late PUT is done over the newer content, and a token that never was is as
#   good.
. "$(dirname "$0")/lib.sh"
apt_unpack libnginx-mod-http-dav-ext=1:3.0.0-3 libnginx-mod-http-xslt-filter nginx libxml2 libxslt1.1 libicu72 \
  libpcre2-8-0
cd "$work"
port=$(free_ports 1)
mkdir files
cat > nginx.conf <<END
load_module $work/debian/usr/lib/nginx/modules/ngx_http_dav_ext_module.so;
daemon off; master_process off; pid $work/pid; error_log $work/errors;
events {}
http {
  access_log off;
  client_body_temp_path body; proxy_temp_path proxy;
  fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  dav_ext_lock_zone zone=locks:1m timeout=2s;
  server {
    listen 127.0.0.1:$port;
    root $work/files;
    location / { dav_methods PUT DELETE; dav_ext_methods LOCK UNLOCK; dav_ext_lock zone=locks; }
  }
}
END
nginx -p "$work" -e errors -c nginx.conf &
wait_for_port "$port"
PORT=$port python3 - > seen 2>&1 <<'END' || true
import http.client, os, time
def ask(method, body=None, **headers):
    server = http.client.HTTPConnection("127.0.0.1", int(os.environ["PORT"]))
    server.request(method, "/report", body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = server.getresponse()
    return answer.status, answer.getheader("Lock-Token"), answer.read().decode()
def lock():
    status, token, _ = ask("LOCK", '<lockinfo xmlns="DAV:"><lockscope><exclusive/></lockscope>'
        '<locktype><write/></locktype></lockinfo>')
    print("LOCK:", status)
    return token
def put(text, token):
    return ask("PUT", text, If=f"({token})")[0]
print("PUT:", ask("PUT", "as it was")[0])
late = lock()
print("the client is held up, its lock of two seconds ends")
for _ in range(100):
    time.sleep(0.2)
    if ask("PUT", "as it was")[0] == 204: break
next_one = lock()
print("the next one: PUT", put("the next one's", next_one))
print("the late one: PUT", put("the late one's", late))
print("the next one: UNLOCK", ask("UNLOCK", Lock_Token=next_one)[0])
print("the late one: PUT", put("the late one's", late))
print("in the file is", ask("GET")[2])
print("a token that never was: PUT", put("anybody's", "<urn:0badcafe>"))
END
still <<'END'
PUT: 201
LOCK: 200
the client is held up, its lock of two seconds ends
LOCK: 200
the next one: PUT 204
the late one: PUT 412
the next one: UNLOCK 204
the late one: PUT 204
in the file is the late one's
a token that never was: PUT 204
END
