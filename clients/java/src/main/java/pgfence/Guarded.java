package pgfence;

import java.sql.Connection;
import java.sql.SQLException;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import org.postgresql.core.BaseConnection;
import org.postgresql.core.TransactionState;
import pgfence.FenceException.LeaseLost;
import pgfence.FenceException.NotSpeaking;
import pgfence.FenceException.StaleToken;
import pgfence.FenceException.TransactionLost;

/**
 * A transaction under a lease, or several: what {@link Holding#guard}, {@link Holding#present} and {@link Fence#guard}
 * return.
 *
 * <p>Where the connection is in autocommit, the transaction begins and ends here. Where it is not, the code that
 * took it out of autocommit (an ORM, a transaction manager) commits or rolls back.
 */
public final class Guarded {
    private final List<Holding> leases;
    private final Connection connection;
    private final boolean guards;
    private final boolean releases;

    Guarded(List<Holding> leases, Connection connection, boolean guards, boolean releases) {
        this.leases = leases;
        this.connection = connection;
        this.guards = guards;
        this.releases = releases;
    }

    /** With this, the last write gives the lease back. */
    public Guarded releasing() {
        return new Guarded(leases, connection, guards, true);
    }

    /**
     * Does it. Errors of pg_fence come out as {@link FenceException}; whatever comes out has rolled it back.
     *
     * @throws SQLException where the transaction cannot begin or commit, or a statement of it had failed
     */
    public <E extends Exception> void run(Work.Step<E> step) throws E, SQLException {
        Work<Void, E> work = on -> {
            step.on(on);
            return null;
        };
        call(work);
    }

    /**
     * As {@link #run}, for a result.
     *
     * @return what it returned, once that is committed
     * @throws SQLException where the transaction cannot begin or commit, or a statement of it had failed
     */
    public <T, E extends Exception> T call(Work<T, E> work) throws E, SQLException {
        Fence.refuseForeign(connection);
        List<String> names = leases.stream().flatMap(lease -> lease.names().stream()).toList();
        Telemetry telemetry = leases.get(0).fence.telemetry();
        Telemetry.Span span = telemetry.begin(guards ? "guard" : "present", names);
        Throwable failure = null;
        try {
            return transaction(work);
        } catch (Throwable error) {
            failure = error;
            if (error instanceof FenceException refusal && refusal.isRefusal()) {
                telemetry.refused(refusal);
            }
            throw Guarded.<RuntimeException>as(error);
        } finally {
            span.end(failure);
        }
    }

    private <T, E extends Exception> T transaction(Work<T, E> work) throws E, SQLException {
        boolean isOurs = connection.getAutoCommit();
        List<Holding> entered = new ArrayList<>();
        List<Holding> paused = new ArrayList<>();
        try {
            for (Holding lease : leases) {
                lease.enter(connection);
                entered.add(lease);
            }
            begin(isOurs);
            T result;
            try {
                result = work.on(connection);
                refuseFailed(isOurs);
                if (releases) {
                    for (Holding lease : leases) {
                        paused.add(lease);
                        lease.pause();
                        lease.releaseBy(connection);
                    }
                }
            } catch (Throwable error) {
                // The error that led here is the one to tell.
                rollBack(isOurs);
                throw Guarded.<RuntimeException>as(told(error));
            }
            commit(isOurs);
            if (releases) {
                leases.forEach(Holding::hasBeenReleased);
            }
            return result;
        } finally {
            paused.forEach(Holding::goOn);
            entered.forEach(lease -> lease.leave(connection));
            leaveTransaction(isOurs);
        }
    }

    private void begin(boolean isOurs) throws SQLException {
        for (boolean isMended = false; ; isMended = true) {
            try {
                for (Holding lease : leases) {
                    if (lease.isInDoubt()) {
                        lease.mend();
                    }
                }
                if (isOurs) {
                    connection.setAutoCommit(false);
                }
                beginUnder();
                leases.forEach(Holding::refuseIfOver);
                return;
            } catch (SQLException | RuntimeException error) {
                rollBack(isOurs);
                Throwable told = told(error instanceof SQLException sql ? FenceException.ofOwnCall(sql) : error);
                // After a failover no token speaks until its holder has renewed, or adopted again.
                if (!isOurs || isMended || !mend(told)) {
                    throw Guarded.<RuntimeException>as(told);
                }
            }
        }
    }

    private void beginUnder() throws SQLException {
        if (leases.size() > 1) {
            Lease.beginGuarding(connection, leases);
        } else if (guards) {
            leases.get(0).beginGuarding(connection);
        } else {
            leases.get(0).beginPresenting(connection);
        }
    }

    private boolean mend(Throwable told) throws SQLException {
        for (Holding lease : leases) {
            if (!lease.canMend(told) || !lease.mend()) {
                return false;
            }
        }
        return true;
    }

    private void commit(boolean isOurs) throws SQLException {
        if (!isOurs) {
            return;
        }
        try {
            connection.commit();
        } catch (SQLException error) {
            Throwable told = told(error);
            if (told instanceof LeaseLost || told instanceof TransactionLost) {
                ((FenceException) told).setInDoubt();
            } else {
                rollBack(true);
            }
            throw Guarded.<RuntimeException>as(told);
        }
    }

    /**
     * Nothing would be committed, quietly, where the work has swallowed the error of a statement, or has rolled back by
     * itself.
     */
    private void refuseFailed(boolean isOurs) throws SQLException {
        if (!connection.isWrapperFor(BaseConnection.class)) {
            return;
        }
        TransactionState state = connection.unwrap(BaseConnection.class).getTransactionState();
        if (state == TransactionState.FAILED) {
            throw new SQLException("a statement of the transaction had failed, so it is rolled back", "25P02");
        }
        if (isOurs && state == TransactionState.IDLE) {
            throw new SQLException("the work has itself ended the transaction that it was in", "25P01");
        }
    }

    private void rollBack(boolean isOurs) {
        try {
            if (isOurs && !connection.isClosed()) {
                connection.rollback();
            }
        } catch (SQLException failure) {
            Holding.LOG.log(System.Logger.Level.DEBUG, "the rollback failed", failure);
        }
    }

    private void leaveTransaction(boolean isOurs) {
        try {
            if (isOurs && !connection.isClosed()) {
                connection.setAutoCommit(true);
            }
        } catch (SQLException failure) {
            Holding.LOG.log(System.Logger.Level.DEBUG, "the connection is of no more use", failure);
        }
    }

    /** The typed error, where it is one. A connection that was broken off because of a loss tells the loss. */
    private Throwable told(Throwable error) {
        Optional<FenceException> found = FenceException.classify(error);
        if (found.isEmpty()) {
            return error;
        }
        if (found.get() instanceof TransactionLost lost) {
            for (Holding lease : leases) {
                if (lease.loss() != null) {
                    return lease.lost(lost.getCause() instanceof SQLException cause ? cause : null);
                }
            }
            // Another connection of the work's broke, but not this one: that is its own business.
            return lost.sqlState().startsWith("08") && isSound() ? error : lost;
        }
        if (found.get() instanceof StaleToken || found.get() instanceof NotSpeaking) {
            leases.forEach(Holding::beatSoon);
        }
        return found.get();
    }

    private boolean isSound() {
        try {
            return !connection.isClosed();
        } catch (SQLException broken) {
            return false;
        }
    }

    /** Throws what the work may throw, whose type the compiler has checked at the caller's. */
    @SuppressWarnings("unchecked")
    private static <E extends Throwable> E as(Throwable error) throws E {
        throw (E) error;
    }
}
