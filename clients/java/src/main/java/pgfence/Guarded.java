package pgfence;

import java.sql.Connection;
import java.sql.SQLException;
import java.util.Optional;
import org.postgresql.core.BaseConnection;
import org.postgresql.core.TransactionState;
import pgfence.FenceException.LeaseLost;
import pgfence.FenceException.NotSpeaking;
import pgfence.FenceException.StaleToken;
import pgfence.FenceException.TransactionLost;

/**
 * A transaction under a lease: what {@link Holding#guard} and {@link Holding#present} return.
 *
 * <p>Where the connection is in autocommit, the transaction begins and ends here. Where it is not, whoever has taken
 * it out of autocommit (an ORM, a transaction manager) commits or rolls back.
 */
public final class Guarded {
    private final Holding lease;
    private final Connection connection;
    private final boolean guards;
    private final boolean releases;

    Guarded(Holding lease, Connection connection, boolean guards, boolean releases) {
        this.lease = lease;
        this.connection = connection;
        this.guards = guards;
        this.releases = releases;
    }

    /** With this, the last write gives the lease back. */
    public Guarded releasing() {
        return new Guarded(lease, connection, guards, true);
    }

    /** Does it. Errors of pg_fence come out as {@link FenceException}; whatever comes out has rolled it back. */
    public <E extends Exception> void run(Work.Step<E> step) throws E, SQLException {
        Work<Void, E> work = on -> {
            step.on(on);
            return null;
        };
        call(work);
    }

    /** As {@link #run}, for a result. */
    public <T, E extends Exception> T call(Work<T, E> work) throws E, SQLException {
        boolean isOurs = connection.getAutoCommit();
        boolean isPaused = false;
        lease.enter(connection);
        try {
            begin(isOurs);
            T result;
            try {
                result = work.on(connection);
                if (releases) {
                    isPaused = true;
                    lease.pause();
                    lease.releaseBy(connection);
                }
            } catch (Throwable error) {
                // The error that led here is the one to tell.
                rollBack(isOurs);
                throw Guarded.<RuntimeException>as(told(error));
            }
            commit(isOurs);
            if (releases) {
                lease.hasBeenReleased();
            }
            return result;
        } finally {
            if (isPaused) {
                lease.goOn();
            }
            lease.leave(connection);
            leaveTransaction(isOurs);
        }
    }

    private void begin(boolean isOurs) throws SQLException {
        for (boolean isMended = false; ; isMended = true) {
            try {
                if (lease.isInDoubt()) {
                    lease.mend();
                }
                if (isOurs) {
                    connection.setAutoCommit(false);
                }
                lease.begin(connection, guards);
                lease.refuseIfOver();
                return;
            } catch (SQLException | RuntimeException error) {
                rollBack(isOurs);
                Throwable told = told(error);
                // After a failover no token speaks until its holder has renewed, or adopted again.
                boolean mayMend = isOurs && !isMended && lease.canMend(told);
                if (!mayMend || !lease.mend()) {
                    throw Guarded.<RuntimeException>as(told);
                }
            }
        }
    }

    private void commit(boolean isOurs) throws SQLException {
        if (!isOurs) {
            return;
        }
        try {
            refuseFailed();
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

    /** A commit would quietly roll back where the work has swallowed the error of a statement. */
    private void refuseFailed() throws SQLException {
        if (connection.isWrapperFor(BaseConnection.class)
                && connection.unwrap(BaseConnection.class).getTransactionState() == TransactionState.FAILED) {
            throw new SQLException("a statement of the transaction had failed, so it is rolled back", "25P02");
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
            if (lease.loss() != null) {
                return lease.lost(lost.getCause() instanceof SQLException cause ? cause : null);
            }
            // Another connection of the work's broke, but not this one: that is its own business.
            return lost.sqlState().startsWith("08") && isSound() ? error : lost;
        }
        if (found.get() instanceof StaleToken || found.get() instanceof NotSpeaking) {
            lease.beatSoon();
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
