#!/bin/bash
# ADOdb 5.21.4 with PHP 8.2 (both of Debian 12), its driver for PostgreSQL: Affected_Rows() is false after each UPDATE.
#
# Guess: whoever claims a job by "UPDATE … WHERE state = 'ready'" asks Affected_Rows(): 1 is claimed, 0 is too late.
#   False is for what failed, and Execute() and ErrorMsg() tell of that, too.
# Seen: it is false for one row, for none and for an error, since a result of PHP 8.1 and newer is an object and no
#   resource. "== 0" is true of it: a worker claims a job, believes that another one has it, and nobody does it. A write
#   with a stale version and one that was done look the same.
. "$(dirname "$0")/lib.sh"
apt_unpack php8.2-cli php8.2-common php8.2-pgsql libphp-adodb=5.21.4-1+deb12u2 libpq5 libargon2-1 libsodium23 \
  libpcre2-8-0 libxml2 libicu72
postgres
cd "$work"
psql -Xq -c "create table jobs (id int primary key, state text)" -c "insert into jobs values (1, 'ready')"
cat > worker.php <<'END'
<?php
require "adodb/adodb.inc.php";
$db = ADONewConnection("postgres9");
$db->NConnect("host=127.0.0.1 dbname=postgres user=postgres port=" . getenv("PGPORT"));
function update($what, $sql) {
    global $db;
    $done = $db->Execute($sql);
    $rows = $db->Affected_Rows();
    echo "$what: Execute() ", $done ? "succeeds" : "fails", ", Affected_Rows() is ", var_export($rows, true), "\n";
    return $rows;
}
if (update("claim", "UPDATE jobs SET state = 'taken' WHERE id = 1 AND state = 'ready'") == 0) {
    echo "the worker takes it for lost; in the table it is {$db->GetOne("SELECT state FROM jobs WHERE id = 1")}\n";
}
update("claim of a taken job", "UPDATE jobs SET state = 'taken' WHERE id = 1 AND state = 'ready'");
update("refused", "UPDATE jobs SET id = NULL");
END
directory=$(echo debian/usr/lib/php/20*)
php8.2 -n -d display_errors=1 -d error_reporting=8191 -d extension_dir="$work/$directory" -d extension=pgsql.so \
  -d include_path="$work/debian/usr/share/php" worker.php > seen 2>&1 || true
still <<'END'
claim: Execute() succeeds, Affected_Rows() is false
the worker takes it for lost; in the table it is taken
claim of a taken job: Execute() succeeds, Affected_Rows() is false
refused: Execute() fails, Affected_Rows() is false
END
