// Takes a lock of Redisson again and again, and prints when it held it, one line each:
// X and the times of begin and end, in nanoseconds of the monotonic clock that all processes
// of the machine share. A span ends with the lease at the latest: whoever is paused for
// longer does not hold the lock any more.
//
// It begins when it reads a line.
//
//   java -cp 'jars/*:classes' RedissonWorker HOST:PORT NAME SECONDS
import java.util.concurrent.TimeUnit;
import org.redisson.Redisson;
import org.redisson.api.RLock;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

public class RedissonWorker {
    static final long LEASE_MILLIS = 3000;

    public static void main(String[] arguments) throws Exception {
        Config config = new Config();
        config.setLockWatchdogTimeout(LEASE_MILLIS);
        config.setThreads(2);
        config.setNettyThreads(2);
        config.useSingleServer()
            .setAddress("redis://" + arguments[0])
            .setConnectionMinimumIdleSize(1)
            .setConnectionPoolSize(2)
            .setSubscriptionConnectionMinimumIdleSize(1)
            .setSubscriptionConnectionPoolSize(2);
        RedissonClient client = Redisson.create(config);
        RLock lock = client.getLock(arguments[1]);
        System.out.println("ready");
        System.in.read(); // all begin together
        long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(Long.parseLong(arguments[2]));
        while (System.nanoTime() < end) {
            lock.lock();
            // Until when it is surely held, since it is unknown when the server granted it.
            long asked = System.nanoTime();
            long left = lock.remainTimeToLive();
            boolean held = lock.isHeldByCurrentThread();
            long from = System.nanoTime();
            Thread.sleep(2);
            long to = Math.min(System.nanoTime(), asked + TimeUnit.MILLISECONDS.toNanos(left));
            if (held && to > from) {
                System.out.println("X " + from + " " + to);
                System.out.flush();
            }
            try {
                lock.unlock();
            } catch (IllegalMonitorStateException lost) {
                // It was paused for longer than its lease.
            }
        }
        client.shutdown();
        System.out.println("done");
    }
}
