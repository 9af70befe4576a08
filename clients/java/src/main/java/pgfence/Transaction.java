package pgfence;

import org.postgresql.core.*;

import pgfence.FenceException.*;
import pgfence.LeaseStates.GuardFailure;
import pgfence.LeaseStates.Stage;
import pgfence.Statements.Statement;

import java.sql.*;
import java.util.*;
import java.util.function.BiConsumer;
import java.util.function.Predicate;

/**
 * A guarded transaction. On a connection in autocommit a transaction begins here. On any other the
 * code that has turned autocommit off (Spring, Hibernate, another guard) has a transaction, which
 * is guarded from a savepoint on.
 */
final class Transaction {
    /** The SQLSTATEs of a savepoint that does not exist, and of a commit of another transaction. */
    private static final String NO_SAVEPOINT = "3B001", NO_SETTING = "22012";

    /** The SQLSTATE after a statement that has failed, and the code of a transaction's end. */
    private static final String HAS_FAILED = "25P02", NO_TRANSACTION = "no transaction";

    private final Heartbeat heartbeat;
    private final List<? extends Holding> holdings;

    /** The holdings that are not adopted, and the row leases among them. */
    private final List<Lease> leases, rows;

    /** The holdings that are not row leases. */
    private final List<? extends Holding> named;

    private final boolean releases;
    private final Connection connection;

    /** The driver's connection, without the wrapper of a pool. */
    private final BaseConnection raw;

    /** The last stage that has begun, and what follows from the error in it. */
    private Stage stage;

    private GuardFailure failure;

    /** True if the guard is a savepoint in a transaction of the program. */
    private boolean isInner;

    private boolean hasRowLocks;

    /** True if a lease may be lost. The leases are then renewed at once, as a check. */
    private boolean isSuspect;

    Transaction(
            Heartbeat heartbeat,
            List<? extends Holding> holdings,
            boolean releases,
            Connection connection)
            throws SQLException {
        if (holdings.isEmpty()) {
            throw new IllegalArgumentException("a guard takes at least one lease");
        }
        if (holdings.stream().anyMatch(one -> one.heartbeat != heartbeat)) {
            throw new IllegalArgumentException("a guard takes leases of its own fence");
        }
        this.heartbeat = heartbeat;
        this.holdings = holdings;
        this.releases = releases;
        leases = holdings.stream().filter(Lease.class::isInstance).map(Lease.class::cast).toList();
        rows = leases.stream().filter(lease -> lease.table != null).toList();
        named = holdings.stream().filter(one -> !rows.contains(one)).toList();
        this.connection = connection;
        raw = unwrapped();
    }

    private BaseConnection unwrapped() {
        try {
            if (connection != null && connection.isWrapperFor(BaseConnection.class)) {
                return connection.unwrap(BaseConnection.class);
            }
        } catch (SQLException hasEnded) {
            // A connection that has ended, or was given back to its pool, wraps nothing any more.
            check();
            throw new TransactionLost(lossMessage("", hasEnded), false, hasEnded);
        }
        Class<?> type = connection == null ? null : connection.getClass();
        throw new IllegalArgumentException(
                "a guard takes an open connection to PostgreSQL, and not " + type);
    }

    <E extends Exception> void run(Holding.Step<E> step) throws E, SQLException {
        run(
                () -> {
                    step.run();
                    return null;
                });
    }

    <T, E extends Exception> T run(Holding.Work<T, E> work) throws E, SQLException {
        try {
            return runOnce(work);
        } catch (Refused refused) {
            if (!failure.again()) {
                throw refused;
            }
            heartbeat.renew(leases);
            return runOnce(work);
        }
    }

    private <T, E extends Exception> T runOnce(Holding.Work<T, E> work) throws E, SQLException {
        String lastStage = "rolled back";
        stage = Stage.OPEN;
        isSuspect = false;
        heartbeat.enterGuard(leases, raw);
        try {
            check();
            begin();
            check();
            stage = Stage.WORK;
            T result = work.run();
            stage = Stage.CHECK;
            // From now on the heartbeat does not renew the leases, which are about to be released.
            if (releases) {
                reportStage("begins");
            }
            throwIfNotOpen();
            stage = Stage.RELEASE;
            release();
            stage = Stage.COMMIT;
            commit();
            lastStage = isInner ? "inner" : "committed";
            return result;
        } catch (Throwable error) {
            Throwable typed = typed(error);
            lastStage = failure.last();
            isSuspect |= failure.suspect();
            // A rollback may hang: then the loss at the deadline cuts the connection.
            reportRowLocks(false);
            rollBack();
            throw Heartbeat.sneakyThrow(typed);
        } finally {
            if (releases && stage.compareTo(Stage.CHECK) >= 0) {
                reportStage(lastStage);
            }
            reportRowLocks(false);
            heartbeat.leaveGuard(leases, raw);
            // The next renewal shows whether the leases are lost; the connection is not broken.
            if (isSuspect) {
                heartbeat.input(states -> states.suspect(Heartbeat.keys(leases)));
            }
        }
    }

    /**
     * Throws LeaseLost if a lease is not held. A last write of a row may come after the deadline,
     * as the table's trigger checks its token.
     */
    private void check() {
        for (Lease lease : leases) {
            boolean isLate = releases && lease.table != null && lease.reason == Reason.DEADLINE;
            if (!isLate) {
                lease.check();
            }
        }
    }

    private void begin() throws SQLException {
        isInner = !connection.getAutoCommit() || raw.getTransactionState() != TransactionState.IDLE;
        if (isInner) {
            execute("SAVEPOINT pg_fence");
        } else {
            connection.setAutoCommit(false);
        }
        stage = Stage.BEGIN;
        if (connection.getAutoCommit() && !isInner) {
            throw new IllegalArgumentException(
                    "the connection stays in autocommit: there is nothing to guard");
        }
        for (Lease row : rows) {
            if (guard(heartbeat.statements.guardRow(row)).get(0)[0] == null) {
                throw lossOf(row);
            }
        }
        reportRowLocks(true);
        if (leases.isEmpty()) {
            guard(heartbeat.statements.guardAdopted(holdings));
        } else if (!named.isEmpty()) {
            guard(heartbeat.statements.guard(named));
        }
    }

    private LeaseLost lossOf(Holding lost) {
        isSuspect = true;
        return new LeaseLost(Reason.GONE, null, lost.names(), false, null);
    }

    /** Reports the stage of a transaction that releases its leases. */
    private void reportStage(String stage) {
        heartbeat.input(states -> states.lastTransaction(Heartbeat.keys(leases), stage));
    }

    /** Reports if this transaction has locked its rows, which nobody else can claim meanwhile. */
    private void reportRowLocks(boolean areLocked) {
        if (hasRowLocks != areLocked) {
            hasRowLocks = areLocked;
            BiConsumer<LeaseStates, String> input =
                    areLocked ? LeaseStates::rowLocked : LeaseStates::rowUnlocked;
            heartbeat.input(
                    states -> Heartbeat.keys(rows).forEach(row -> input.accept(states, row)));
        }
    }

    /**
     * Throws if the work has ended the transaction, or has swallowed an error, after which the
     * commit would roll back without an error.
     */
    private void throwIfNotOpen() throws SQLException {
        TransactionState state = raw.getTransactionState();
        if (raw.isClosed() || state != TransactionState.OPEN) {
            String ended = state == TransactionState.FAILED ? HAS_FAILED : NO_SAVEPOINT;
            throw new SQLException("it is not open any more", raw.isClosed() ? "08003" : ended);
        }
    }

    private void release() throws SQLException {
        if (!releases) {
            return;
        }
        for (Lease row : rows) {
            rows(heartbeat.statements.releaseGuardedRow(row));
        }
        List<Object[]> lost =
                named.isEmpty() ? List.of() : rows(heartbeat.statements.releaseGuarded(named));
        for (Holding holding : named) {
            if (lost.stream().anyMatch(name -> holding.names().contains(name[0]))) {
                throw lossOf(holding);
            }
        }
    }

    private void commit() throws SQLException {
        if (isInner) {
            execute("RELEASE SAVEPOINT pg_fence");
        } else {
            execute(Statements.COMMIT);
            connection.setAutoCommit(true);
        }
    }

    /** Rolls back, or cuts the connection if that fails. The caller throws the first error. */
    private void rollBack() {
        try {
            if (stage == Stage.OPEN || raw.isClosed()) {
                return;
            }
            if (!isInner) {
                connection.rollback();
                connection.setAutoCommit(true);
            } else if (raw.getTransactionState() != TransactionState.IDLE) {
                // These are two calls, as the driver may send a savepoint before a text of two.
                execute("ROLLBACK TO SAVEPOINT pg_fence");
                execute("RELEASE SAVEPOINT pg_fence");
            }
        } catch (SQLException | RuntimeException error) {
            Connections.cut(raw);
        }
    }

    /**
     * Runs a statement of the guard. That of an inner guard makes no setting: the work may have
     * begun the transaction around it. The RELEASE tells if its savepoint has ended.
     */
    private List<Object[]> guard(Statement statement) throws SQLException {
        return rows(isInner ? statement : Statements.withSetting(statement));
    }

    private List<Object[]> rows(Statement statement) throws SQLException {
        return Connections.rows(connection, statement, false);
    }

    private void execute(String sql) throws SQLException {
        try (java.sql.Statement statement = connection.createStatement()) {
            statement.execute(sql);
        }
    }

    /** Returns the code of an error. */
    private String codeOf(Throwable error) {
        String state = FenceException.stateOf(error);
        // The setting is checked while the transaction is open; a commit that fails has ended it.
        boolean hasNoSetting =
                stage == Stage.COMMIT
                        && state.equals(NO_SETTING)
                        && raw.getTransactionState() != TransactionState.IDLE;
        boolean hasNoSavepoint = stage != Stage.WORK && state.equals(NO_SAVEPOINT);
        return hasNoSetting || hasNoSavepoint ? NO_TRANSACTION : state;
    }

    /** Asks what follows from an error, and returns the error to throw. */
    private Throwable typed(Throwable error) throws SQLException {
        String code = codeOf(error), session = raw.isClosed() ? "closed" : "open";
        boolean isFatal = FenceException.isFatal(error);
        String of = leases.isEmpty() ? "adopted" : named.isEmpty() ? "rows" : "names";
        Predicate<Lease> isLost = lease -> lease.isLost() || heartbeat.isOver(lease);
        Optional<Lease> lost = leases.stream().filter(isLost).findFirst();
        failure =
                LeaseStates.guardFailed(
                        stage, code, isFatal, session, of, isInner, lost.isPresent());
        if (error instanceof FenceException || error instanceof Error) {
            return error;
        }
        return switch (failure.error()) {
            case "LeaseLost" -> lost.get().loss(failure.inDoubt(), error);
            case "TransactionLost" ->
                    new TransactionLost(lossMessage(code, error), failure.inDoubt(), error);
            case "LeaseTaken" -> {
                String holder = FenceException.holderOf(error);
                yield new LeaseTaken(holdings.get(0).names(), holder, 0, null, error);
            }
            default -> {
                String role = raw.getQueryExecutor().getUser();
                Statements.Table table = named.isEmpty() ? rows.get(0).table : null;
                yield FenceException.typed(error, failure.error(), role, table);
            }
        };
    }

    private static String lossMessage(String code, Throwable error) {
        return switch (code) {
            case NO_TRANSACTION ->
                    "the work has ended the transaction itself: what it did after that was not"
                            + " guarded";
            case HAS_FAILED ->
                    "a statement of the transaction has failed: all of it is rolled back";
            default -> "the session ended under the transaction: " + error.getMessage();
        };
    }
}
