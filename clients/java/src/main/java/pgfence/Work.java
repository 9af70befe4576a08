package pgfence;

import java.sql.Connection;

/** What is done in a transaction under a lease, for its result. */
@FunctionalInterface
public interface Work<T, E extends Exception> {
    /** The work. Where it fails, the transaction is rolled back. */
    T on(Connection connection) throws E;

    /** What is done for its effect. */
    @FunctionalInterface
    interface Step<E extends Exception> {
        /** The work. Where it fails, the transaction is rolled back. */
        void on(Connection connection) throws E;
    }
}
