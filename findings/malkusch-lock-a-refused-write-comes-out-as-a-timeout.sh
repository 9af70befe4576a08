#!/bin/bash
# malkusch/lock 2.2.1 (PHP, Debian 12), its TransactionalMutex: a write that is refused for good comes out as a timeout.
#
# Guess: its page says that a PDOException has the block executed again, in a new transaction. If that does not help
#   within the three seconds, synchronized() throws the error that it could not get over, or one that has it as its
#   previous one: a unique key that is violated, or a trigger's refusal of a stale version, is told from a busy row.
# Seen: after more than ten runs of the block a TimeoutException is thrown which knows neither the error nor its
#   SQLSTATE. What was refused for good looks like a busy lock, and the caller tries again later.
. "$(dirname "$0")/lib.sh"
apt_unpack php8.2-cli php8.2-common php8.2-pgsql php-malkusch-lock=2.2.1+ds-1 php-psr-log libpq5 libargon2-1 \
  libsodium23 libpcre2-8-0 libxml2 libicu72
postgres
cd "$work"
psql -Xq -c "create table payments (invoice int primary key)" -c "insert into payments values (7)"
cat > pay.php <<'END'
<?php
require "Malkusch/Lock/autoload.php";
$pdo = new PDO("pgsql:host=127.0.0.1;dbname=postgres;user=postgres;port=" . getenv("PGPORT"));
$pdo->setAttribute(PDO::ATTR_ERRMODE, PDO::ERRMODE_EXCEPTION);
$sent = 0;
try {
    (new malkusch\lock\mutex\TransactionalMutex($pdo, 3))->synchronized(function () use ($pdo, &$sent) {
        $sent++;
        $pdo->exec("INSERT INTO payments VALUES (7)");
    });
} catch (Exception $error) {
    echo get_class($error), ": ", $error->getMessage(), "\n";
    echo "code: ", $error->getCode(), ", previous: ", var_export($error->getPrevious(), true), "\n";
}
echo "the block was run more than ten times: ", var_export($sent > 10, true), "\n";
END
directory=$(echo debian/usr/lib/php/20*)
php8.2 -n -d display_errors=1 -d extension_dir="$work/$directory" -d extension=pdo.so -d extension=pdo_pgsql.so \
  -d include_path="$work/debian/usr/share/php" pay.php > seen 2>&1 || true
still <<'END'
malkusch\lock\exception\TimeoutException: Timeout of 3 seconds exceeded.
code: 0, previous: NULL
the block was run more than ten times: true
END
