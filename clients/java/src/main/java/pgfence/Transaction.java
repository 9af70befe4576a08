package pgfence;

import org.postgresql.core.*;

import pgfence.FenceException.*;
import pgfence.Statements.Statement;

import java.sql.*;
import java.util.*;
import java.util.function.BiConsumer;

/**
 * A transaction under leases. A connection in autocommit gets one of its own. On any other it is
 * the transaction of the code that has ended the autocommit (Spring, Hibernate, another guard),
 * which is guarded from a savepoint on.
 */
final class Transaction {
    /**
     * The token is of this transaction alone: if the work has ended it, and begun another one, that
     * is not committed.
     */
    private static final String COMMIT = "SELECT current_setting('pg_fence.token')::bigint; COMMIT";

    /** There is no such savepoint any more; or no token, so that the text is no number. */
    private static final String NO_SAVEPOINT = "3B001", NO_TOKEN = "22P02";

    /** How far it has come, and where it stays when something fails. */
    private enum Stage {
        BEFORE,
        BEGUN,
        WORK,
        ENDING,
        COMMITTING
    }

    private final Heartbeat heartbeat;
    private final List<? extends Holding> held;

    /** The same; none if it is adopted. */
    private final List<Lease> leases, rows;

    /** Those of names: an adopted one, too. */
    private final List<? extends Holding> named;

    private final boolean releases;
    private final Connection connection;

    /** The driver's own, whatever a pool has put around it. */
    private final BaseConnection raw;

    private Stage stage;
    private boolean isInner, isTouching, isStale;

    Transaction(Heartbeat heartbeat, List<? extends Holding> held, boolean releases, Connection on)
            throws SQLException {
        if (held.isEmpty()) {
            throw new IllegalArgumentException("a guard takes at least one lease");
        }
        if (held.stream().anyMatch(one -> one.heartbeat != heartbeat)) {
            throw new IllegalArgumentException("a guard takes leases of its own fence");
        }
        if (on == null || !on.isWrapperFor(BaseConnection.class)) {
            throw new IllegalArgumentException(
                    "a guard takes a connection to PostgreSQL, and not " + on);
        }
        this.heartbeat = heartbeat;
        this.held = held;
        this.releases = releases;
        leases = held.stream().filter(Lease.class::isInstance).map(Lease.class::cast).toList();
        rows = leases.stream().filter(lease -> lease.table != null).toList();
        named = held.stream().filter(one -> !rows.contains(one)).toList();
        connection = on;
        raw = on.unwrap(BaseConnection.class);
    }

    <E extends Exception> void around(Holding.Step<E> step) throws E, SQLException {
        around(
                () -> {
                    step.run();
                    return null;
                });
    }

    <T, E extends Exception> T around(Holding.Work<T, E> work) throws E, SQLException {
        try {
            return once(work);
        } catch (Refused refused) {
            boolean isOfBegin = stage == Stage.BEGUN && !isInner && !leases.isEmpty();
            if (!isOfBegin || !refused.sqlState().equals("PF004")) {
                throw refused;
            }
            // After a failover no token speaks until its holder has renewed.
            heartbeat.renew(leases);
            return once(work);
        }
    }

    private <T, E extends Exception> T once(Holding.Work<T, E> work) throws E, SQLException {
        String ends = "rolled back";
        stage = Stage.BEFORE;
        isStale = false;
        heartbeat.enter(leases, raw);
        try {
            check();
            begin();
            check();
            stage = Stage.WORK;
            T result = work.run();
            stage = Stage.ENDING;
            // The heartbeat leaves out what is about to be released.
            if (releases) {
                last("begins");
            }
            refuseIfFailed();
            release();
            stage = Stage.COMMITTING;
            commit();
            ends = isInner ? "inner" : "committed";
            return result;
        } catch (Throwable error) {
            Throwable told = told(error);
            if (told instanceof FenceException lost && lost.inDoubt()) {
                ends = "in doubt";
            }
            rollBack();
            throw Heartbeat.as(told);
        } finally {
            if (releases && stage.compareTo(Stage.ENDING) >= 0) {
                last(ends);
            }
            touches(false);
            heartbeat.leave(leases, raw);
            // The next renewal tells what the server thinks; but the connection is sound.
            if (isStale) {
                heartbeat.input(states -> states.suspect(Heartbeat.keys(leases)));
            }
        }
    }

    /** The last write of a row whose window is over is checked by the table's trigger. */
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
                throw gone(row);
            }
        }
        touches(true);
        if (leases.isEmpty()) {
            rows(heartbeat.statements.guardAdopted(held));
        } else if (!named.isEmpty()) {
            rows(heartbeat.statements.guard(named));
        }
    }

    private LeaseLost gone(Holding lost) {
        isStale = true;
        return new LeaseLost(Reason.GONE, null, lost.names(), false, null);
    }

    /** Tells how far a transaction has come that releases. */
    private void last(String stage) {
        heartbeat.input(states -> states.last(Heartbeat.keys(leases), stage));
    }

    /** Nobody else can claim a row while a transaction of ours has written it. */
    private void touches(boolean begins) {
        if (isTouching != begins) {
            isTouching = begins;
            BiConsumer<LeaseState, String> tells = begins ? LeaseState::touches : LeaseState::ended;
            heartbeat.input(
                    states -> Heartbeat.keys(rows).forEach(row -> tells.accept(states, row)));
        }
    }

    /** The work may have swallowed an error: then the commit would roll back, and say nothing. */
    private void refuseIfFailed() throws SQLException {
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
            rows(heartbeat.statements.lastOfRow(row));
        }
        List<Object[]> gone = named.isEmpty() ? List.of() : rows(heartbeat.statements.last(named));
        for (Holding one : named) {
            if (gone.stream().anyMatch(name -> one.names().contains(name[0]))) {
                throw gone(one);
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

    /** A connection on which that fails ends. The error that led here is the one to tell. */
    private void rollBack() {
        try {
            if (stage == Stage.BEFORE || raw.isClosed()) {
                return;
            }
            if (!isInner) {
                connection.rollback();
                connection.setAutoCommit(true);
            } else if (raw.getTransactionState() != TransactionState.IDLE) {
                // Not in one text, before which the driver may send a savepoint of its own.
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
     * The typed error, if it is one. A connection that was cut because of a loss tells the loss.
     */
    private Throwable told(Throwable error) throws SQLException {
        String state = FenceException.stateOf(error);
        if (error instanceof FenceException || error instanceof Error) {
            return error;
        }
        if (FenceException.isEnd(error) && raw.isClosed()) {
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
        // A commit that fails has ended the transaction: the token was there before.
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
        // What a commit refuses is the work's, as a deferred constraint is.
        if (isOfCommit || stage == Stage.WORK) {
            return FenceException.ofWork(error);
        }
        Throwable told =
                FenceException.ofCall(
                        error,
                        raw.getMetaData().getUserName(),
                        named.isEmpty() ? rows.get(0).table : null);
        // NULL from lease_adopt: an older number is guarded. PF004 from it: another holder has
        // adopted this number.
        boolean isTaken = stage == Stage.BEGUN && leases.isEmpty() && state.matches("22004|PF004");
        return isTaken && told instanceof Refused refused
                ? new LeaseTaken(held.get(0).names(), refused.holder(), 0, null, error)
                : told;
    }
}
