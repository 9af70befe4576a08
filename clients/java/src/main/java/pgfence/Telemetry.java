package pgfence;

import java.util.List;
import pgfence.FenceException.LeaseLost;

/**
 * Told what the client does, for traces and metrics: {@code new Fence(url).telemetry(…)}. Spans and refusals are told on
 * the thread of the work, losses on one of their own. It may not throw.
 */
public interface Telemetry {
    /** Where nothing is told. */
    Telemetry NONE = new Telemetry() {};

    /**
     * A span begins.
     *
     * @param verb {@code acquire}, {@code resume}, {@code claim}, {@code guard} or {@code present}
     * @param names of the lease
     * @return told of its end
     */
    default Span begin(String verb, List<String> names) {
        return error -> {};
    }

    /**
     * A lease is lost: a counter.
     *
     * @param loss why
     */
    default void lost(LeaseLost loss) {}

    /**
     * The server has refused a write or a guard (PF001 to PF005): a counter.
     *
     * @param refusal which
     */
    default void refused(FenceException refusal) {}

    /** What lasts from {@link #begin} to its end. */
    @FunctionalInterface
    interface Span {
        /**
         * It ends.
         *
         * @param error with which, or null
         */
        void end(Throwable error);
    }
}
