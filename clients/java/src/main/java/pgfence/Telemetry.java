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
     */
    default Span begin(String verb, List<String> names) {
        return error -> {};
    }

    /** A lease is lost: a counter. */
    default void lost(LeaseLost loss) {}

    /** The server has refused a write or a guard (PF001 to PF005): a counter. */
    default void refused(FenceException refusal) {}

    /** What lasts from {@link #begin} to its end. */
    @FunctionalInterface
    interface Span {
        /** It ends, with that error or null. */
        void end(Throwable error);
    }
}
