#!/bin/bash
# Symfony Lock 5.4.53 (PHP, Debian 12): a reader that is refused as a writer does not know any more what it has.
#
# Guess: a reader asks for the write lock by acquire() of the same object. While there is another reader it is refused
#   and stays a reader: isAcquired() says so, no writer gets in, and release() ends its part.
# Seen: FlockStore has lost the read lock (flock(2) drops it before it tries) and says that it is there: a writer gets
#   in beside the reader, and release() raises. PostgreSqlStore has kept it in its session and says that it is gone:
#   release() does nothing, and no writer gets in any more as long as the connection lives.
. "$(dirname "$0")/lib.sh"
apt_unpack php-symfony-lock=5.4.53+dfsg-0+deb12u1 php-symfony-deprecation-contracts php-psr-log php8.2-cli \
  php8.2-common php8.2-pgsql libargon2-1 libedit2 libicu72 libmagic1 libpcre2-8-0 libpq5 libsodium23 libxml2
postgres
cd "$work"
cat > readers.php <<'END'
<?php
set_include_path("debian/usr/share/php");
require "Psr/Log/autoload.php";
require "Symfony/Component/Lock/autoload.php";
use Symfony\Component\Lock\{Key, Lock, Store\FlockStore, Store\PostgreSqlStore};

mkdir("locks");
$stores = [
    "FlockStore" => fn() => new FlockStore("locks"),
    "PostgreSqlStore" => fn() => new PostgreSqlStore(
        new PDO("pgsql:host=127.0.0.1;port=" . getenv("PGPORT") . ";dbname=postgres", "postgres", null,
            [PDO::ATTR_ERRMODE => PDO::ERRMODE_EXCEPTION])),
];
foreach ($stores as $name => $store) {
    // Without release at the object's end, so that each has its own store and connection and nothing happens unasked.
    $party = fn() => new Lock(new Key("report"), $store(), null, false);
    $yes = fn(bool $it) => $it ? "yes" : "no";
    [$reader, $other, $writer] = [$party(), $party(), $party()];
    echo "$name: reader {$yes($reader->acquireRead())}, another {$yes($other->acquireRead())}",
        "; the reader as a writer: {$yes($reader->acquire())}; is it acquired? {$yes($reader->isAcquired())}\n";
    $other->release();
    echo "$name: the other reader has ended; a writer: {$yes($writer->acquire())}",
        "; is the reader's acquired? {$yes($reader->isAcquired())}\n";
    if ($writer->isAcquired()) $writer->release();
    try {
        $reader->release();
        $end = "went well";
    } catch (Throwable $e) {
        $end = get_class($e);
    }
    echo "$name: the reader's release: $end; a writer: {$yes($writer->acquire())}\n";
}
END
extensions=$(echo "$work"/debian/usr/lib/php/2*)
php8.2 -n -d extension_dir="$extensions" -d extension=pdo -d extension=pdo_pgsql readers.php > seen 2>&1 || true
still <<'END'
FlockStore: reader yes, another yes; the reader as a writer: no; is it acquired? yes
FlockStore: the other reader has ended; a writer: yes; is the reader's acquired? yes
FlockStore: the reader's release: TypeError; a writer: yes
PostgreSqlStore: reader yes, another yes; the reader as a writer: no; is it acquired? no
PostgreSqlStore: the other reader has ended; a writer: no; is the reader's acquired? no
PostgreSqlStore: the reader's release: went well; a writer: no
END
