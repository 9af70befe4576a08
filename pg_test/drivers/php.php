<?php
$db = new PDO(getenv('PDO_DSN'));
$lost = $db->query("SELECT lease_acquire('order:7', 'php')")->fetchColumn();
echo 'lost is ', var_export($lost, true), "\n";
try { $db->exec("UPDATE orders SET status = 'late'"); } catch (PDOException $e) {
    echo 'refused ', $e->getCode(), ' ', str_contains($e->errorInfo[2], 'orders') ? 'detail' : 'no detail', "\n";
}
$db->beginTransaction();
$db->exec("UPDATE notes SET text = 'lost'");
try { $db->query('SELECT 1 / 0'); } catch (PDOException $e) {}
echo 'commit ', $db->commit() ? 'is silent' : 'tells', "\n";
