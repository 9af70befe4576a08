package pgfence;

import org.postgresql.core.*;

import pgfence.FenceException.*;
import pgfence.Statements.Statement;

import java.sql.*;
import java.util.*;
import java.util.function.BiConsumer;

/**
 * A guarded transaction. On a connection in autocommit a transaction begins here. On any other the
 * code that has turned autocommit off (Spring, Hibernate, another guard) has a transaction, which
 * is guarded from a savepoint on.
 */
final class Transaction {
    /**
     * Commits only the guarded transaction. If the work has ended it and begun another one, the
     * setting has no token there, and the cast fails.
     */
    private static final String COMMIT = "SELECT current_setting('pg_fence.token')::bigint; COMMIT";

    /** The SQLSTATEs of a savepoint that does not exist, and of a setting without a token. */
    private static final String NO_SAVEPOINT = "3B001", NO_TOKEN = "22P02";

    /** The last stage that has begun. After an error it shows where that happened. */
    private enum Stage {
        BEFORE,
        BEGUN,
        WORK,
        ENDING,
        COMMITTING
    }

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

    private Stage stage;

    /** True if the guard is a savepoint in a transaction of the program. */
    private boolean isInner;

    private boolean hasRowLocks;

    /** True if the server has refused a token. The leases are then renewed at once, as a check. */
    private boolean isStale;

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
        if (connection == null || !connection.isWrapperFor(BaseConnection.class)) {
            throw new IllegalArgumentException(
                    "a guard takes a connection to PostgreSQL, and not " + connection);
        }
        this.heartbeat = heartbeat;
        this.holdings = holdings;
        this.releases = releases;
        leases = holdings.stream().filter(Lease.class::isInstance).map(Lease.class::cast).toList();
        rows = leases.stream().filter(lease -> lease.table != null).toList();
        named = holdings.stream().filter(one -> !rows.contains(one)).toList();
        this.connection = connection;
        raw = connection.unwrap(BaseConnection.class);
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
            boolean isOfGuard = stage == Stage.BEGUN && !isInner && !leases.isEmpty();
            if (!isOfGuard || !refused.sqlState().equals("PF004")) {
                throw refused;
            }
            // After a failover a token is refused until its holder has renewed the lease.
            heartbeat.renew(leases);
            return runOnce(work);
        }
    }

    private <T, E extends Exception> T runOnce(Holding.Work<T, E> work) throws E, SQLException {
        String lastStage = "rolled back";
        stage = Stage.BEFORE;
        isStale = false;
        heartbeat.enterGuard(leases, raw);
        try {
            check();
            begin();
            check();
            stage = Stage.WORK;
            T result = work.run();
            stage = Stage.ENDING;
            // From now on the heartbeat does not renew the leases, which are about to be released.
            if (releases) {
                reportStage("begins");
            }
            throwIfFailed();
            release();
            stage = Stage.COMMITTING;
            commit();
            lastStage = isInner ? "inner" : "committed";
            return result;
        } catch (Throwable error) {
            Throwable typed = typed(error);
            if (typed instanceof FenceException lost && lost.inDoubt()) {
                lastStage = "in doubt";
            }
            rollBack();
            throw Heartbeat.sneakyThrow(typed);
        } finally {
            if (releases && stage.compareTo(Stage.ENDING) >= 0) {
                reportStage(lastStage);
            }
            reportRowLocks(false);
            heartbeat.leaveGuard(leases, raw);
            // The next renewal shows whether the leases are lost; the connection is not broken.
            if (isStale) {
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
        stage = Stage.BEGUN;
        if (connection.getAutoCommit() && !isInner) {
            throw new IllegalArgumentException(
                    "the connection stays in autocommit: there is nothing to guard");
        }
        for (Lease row : rows) {
            if (rows(heartbeat.statements.guardRow(row)).get(0)[0] == null) {
                throw lossOf(row);
            }
        }
        reportRowLocks(true);
        if (leases.isEmpty()) {
            rows(heartbeat.statements.guardAdopted(holdings));
        } else if (!named.isEmpty()) {
            rows(heartbeat.statements.guard(named));
        }
    }

    private LeaseLost lossOf(Holding lost) {
        isStale = true;
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
     * Throws if the work has swallowed an error: the commit would then roll back without an error.
     */
    private void throwIfFailed() throws SQLException {
        if (raw.isClosed()) {
            throw new SQLException("the connection is closed", "08003");
        }
        if (raw.getTransactionState() == TransactionState.FAILED) {
            throw new TransactionLost(
                    "a statement of the transaction has failed: all of it is rolled back",
                    false,
                    null);
        }
        if (raw.getTransactionState() == TransactionState.IDLE) {
            throw new SQLException("there is none", NO_SAVEPOINT);
        }
    }

    private void release() throws SQLException {
        if (!releases) {
            return;
        }
        for (Lease row : rows) {
            rows(heartbeat.statements.releaseGuardedRow(row));
        }
        List<Object[]> gone =
                named.isEmpty() ? List.of() : rows(heartbeat.statements.releaseGuarded(named));
        for (Holding holding : named) {
            if (gone.stream().anyMatch(name -> holding.names().contains(name[0]))) {
                throw lossOf(holding);
            }
        }
    }

    private void commit() throws SQLException {
        if (isInner) {
            execute("RELEASE SAVEPOINT pg_fence");
        } else {
            execute(COMMIT);
            connection.setAutoCommit(true);
        }
    }

    /** Rolls back, or cuts the connection if that fails. The caller throws the first error. */
    private void rollBack() {
        try {
            if (stage == Stage.BEFORE || raw.isClosed()) {
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

    private List<Object[]> rows(Statement statement) throws SQLException {
        return Connections.rows(connection, statement, false);
    }

    private void execute(String sql) throws SQLException {
        try (java.sql.Statement statement = connection.createStatement()) {
            statement.execute(sql);
        }
    }

    /**
     * Returns the client's error for an error of the driver, if there is one. If a loss has cut the
     * connection, it is LeaseLost.
     */
    private Throwable typed(Throwable error) throws SQLException {
        String state = FenceException.stateOf(error);
        if (error instanceof FenceException || error instanceof Error) {
            return error;
        }
        if (FenceException.isSessionEnd(error) && raw.isClosed()) {
            // The server may have ended an idle transaction before it read the commit.
            boolean inDoubt = stage == Stage.COMMITTING && !state.matches("25P0[34]");
            String lost = "the session ended under the transaction: " + error.getMessage();
            return leases.stream()
                    .filter(Lease::isLost)
                    .findFirst()
                    .<Throwable>map(lease -> lease.loss(inDoubt, error))
                    .orElseGet(() -> new TransactionLost(lost, inDoubt, error));
        }
        isStale = state.matches("PF00[14]");
        boolean isOfCommit = stage == Stage.COMMITTING;
        // The token is checked while the transaction is open; a commit that fails has ended it.
        boolean hasNoToken =
                isOfCommit
                        && state.equals(NO_TOKEN)
                        && raw.getTransactionState() != TransactionState.IDLE;
        if (hasNoToken || stage != Stage.WORK && state.equals(NO_SAVEPOINT)) {
            String ended =
                    "the work has ended the transaction itself: what it did after that was not"
                            + " guarded";
            return new TransactionLost(ended, true, error);
        }
        // An error of the commit, as of a deferred constraint, is an error of the work.
        if (isOfCommit || stage == Stage.WORK) {
            return FenceException.ofWork(error);
        }
        Throwable typed =
                FenceException.ofCall(
                        error,
                        raw.getMetaData().getUserName(),
                        named.isEmpty() ? rows.get(0).table : null);
        // NULL from lease_adopt: an older number is guarded. PF004 from it: another holder has
        // adopted this number.
        boolean isTaken = stage == Stage.BEGUN && leases.isEmpty() && state.matches("22004|PF004");
        return isTaken && typed instanceof Refused refused
                ? new LeaseTaken(holdings.get(0).names(), refused.holder(), 0, null, error)
                : typed;
    }
}
