package pgfence;

import java.sql.Connection;

/**
 * What is done in a transaction under a lease, for its result.
 *
 * @param <T> the result's type
 * @param <E> what it may throw
 */
@FunctionalInterface
public interface Work<T, E extends Exception> {
    /**
     * The work.
     *
     * @param connection that of the transaction
     * @return the result
     * @throws E where it failed: the transaction is then rolled back
     */
    T on(Connection connection) throws E;

    /**
     * What is done for its effect.
     *
     * @param <E> what it may throw
     */
    @FunctionalInterface
    interface Step<E extends Exception> {
        /**
         * The work.
         *
         * @param connection that of the transaction
         * @throws E where it failed: the transaction is then rolled back
         */
        void on(Connection connection) throws E;
    }
}
