<?php
// Doctrine on a managed table of work, with the mapping of docs/recipes/work-table.md: it saves a run that it has claimed, one that
// was swept up since, and one that was claimed since. It fails where something else comes of it than the page says.

require 'Doctrine/ORM/autoload.php';
require 'Symfony/Component/Cache/autoload.php';

use Doctrine\DBAL\DriverManager;
use Doctrine\DBAL\Exception\DriverException;
use Doctrine\ORM\EntityManager;
use Doctrine\ORM\Mapping as ORM;
use Doctrine\ORM\ORMSetup;

#[ORM\Entity]
#[ORM\Table(name: 'runs')]
class Run
{
    #[ORM\Id]
    #[ORM\Column(type: 'bigint')]
    public $id;
    #[ORM\Column(type: 'text', nullable: true)]
    public $result;
}

[, $port, $database] = $argv;
$place = ['driver' => 'pdo_pgsql', 'host' => '127.0.0.1', 'port' => (int) $port, 'dbname' => $database, 'user' => 'postgres'];
$connection = DriverManager::getConnection($place);
$mapping = ORMSetup::createAttributeMetadataConfiguration([__DIR__], true);

function claim($connection)
{
    return $connection->fetchOne(
        "UPDATE runs SET state = 'running', held_until = clock_timestamp() + '1 h' WHERE id = 1 RETURNING fence"
    );
}

function give_up($connection, $token)
{
    $connection->transactional(function ($connection) use ($token) {
        $connection->executeQuery("SELECT set_config('pg_fence.token', ?, true)", [$token]);
        $connection->executeStatement("UPDATE runs SET state = 'ready', held_until = NULL WHERE id = 1");
    });
}

function comes($token, $what, $wanted)
{
    global $place, $mapping;
    $manager = EntityManager::create($place, $mapping);
    try {
        $manager->wrapInTransaction(function ($manager) use ($token, $what) {
            $manager->getConnection()->executeQuery("SELECT set_config('pg_fence.token', ?, true)", [$token]);
            $manager->find(Run::class, 1)->result = $what;
        });
        $came = 'done';
    } catch (DriverException $error) {
        $came = $error->getSQLState();
    }
    if ($came !== $wanted) {
        fwrite(STDERR, "$what: $came, not $wanted\n");
        exit(1);
    }
}

$connection->fetchOne("SELECT fence_protect('runs', mode => 'managed', deadline => 'held_until')::text");
$token = claim($connection);
comes($token, 'holds it', 'done');
comes($token, 'writes again', 'done');
give_up($connection, $token);
comes($token, 'swept up', 'PF004');
$newer = claim($connection);
comes($token, 'claimed since', 'PF001');
if ($connection->fetchOne('SELECT result FROM runs WHERE id = 1') !== 'writes again') {
    fwrite(STDERR, "another result\n");
    exit(1);
}
