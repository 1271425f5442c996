// Takes a lock of Curator again and again, and prints when it held it, one line each:
// the kind (X exclusive, R shared, P permit) and the times of begin and end, in nanoseconds
// of the monotonic clock that all processes of the machine share.
//
// It begins when it reads a line.
//
//   java -cp 'jars/*' CuratorWorker.java HOST:PORT KIND PATH SECONDS
//
// KIND is mutex, read, write, or semaphore (of two permits).
//
//   java -cp 'jars/*' CuratorWorker.java bench HOST:PORT hot|own TASKS SECONDS
//
// Counts how often threads take and release a lock: the same one, or one each.
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Locale;
import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.framework.recipes.locks.InterProcessReadWriteLock;
import org.apache.curator.framework.recipes.locks.InterProcessSemaphoreV2;
import org.apache.curator.framework.recipes.locks.Lease;
import org.apache.curator.retry.RetryNTimes;

public class CuratorWorker {
    public static void main(String[] arguments) throws Exception {
        if (arguments[0].equals("bench")) {
            bench(arguments[1], arguments[2], Integer.parseInt(arguments[3]), Long.parseLong(arguments[4]));
        } else {
            work(arguments);
        }
    }

    static CuratorFramework connect(String host, int timeoutMs) {
        CuratorFramework client = CuratorFrameworkFactory.builder()
            .connectString(host)
            .sessionTimeoutMs(timeoutMs)
            .connectionTimeoutMs(4000)
            .retryPolicy(new RetryNTimes(20, 100))
            .build();
        client.start();
        return client;
    }

    static void bench(String host, String keys, int tasks, long seconds) throws Exception {
        CuratorFramework client = connect(host, 10000);
        List<Long> waits = Collections.synchronizedList(new ArrayList<>());
        long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(seconds);
        List<Thread> threads = new ArrayList<>();
        for (int task = 0; task < tasks; task++) {
            String path = keys.equals("hot") ? "/bench/curator" : "/bench/curator-" + task;
            InterProcessMutex mutex = new InterProcessMutex(client, path);
            Thread thread = new Thread(() -> {
                try {
                    while (System.nanoTime() < end) {
                        long asked = System.nanoTime();
                        mutex.acquire();
                        waits.add(System.nanoTime() - asked);
                        mutex.release();
                    }
                } catch (Exception error) {
                    throw new RuntimeException(error);
                }
            });
            threads.add(thread);
            thread.start();
        }
        for (Thread thread : threads) {
            thread.join();
        }
        client.close();
        Collections.sort(waits);
        System.out.printf(Locale.ROOT, "%.1f locks/s, p50 %.2fms, p99 %.2fms%n", waits.size() / (double) seconds,
            waits.get(waits.size() / 2) / 1e6, waits.get(waits.size() * 99 / 100) / 1e6);
    }

    static void work(String[] arguments) throws Exception {
        String kind = arguments[1];
        String path = arguments[2];
        CuratorFramework client = connect(arguments[0], 3000);
        InterProcessReadWriteLock both = new InterProcessReadWriteLock(client, path);
        InterProcessMutex mutex = switch (kind) {
            case "read" -> both.readLock();
            case "write" -> both.writeLock();
            default -> new InterProcessMutex(client, path);
        };
        InterProcessSemaphoreV2 semaphore = new InterProcessSemaphoreV2(client, path, 2);
        String letter = kind.equals("read") ? "R" : kind.equals("semaphore") ? "P" : "X";
        System.out.println("ready");
        System.in.read(); // all begin together
        long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(Long.parseLong(arguments[3]));
        while (System.nanoTime() < end) {
            Lease lease = null;
            if (kind.equals("semaphore")) {
                lease = semaphore.acquire();
            } else {
                mutex.acquire();
            }
            long from = System.nanoTime();
            Thread.sleep(lease == null ? 1 : 10); // permits are to be held together
            System.out.println(letter + " " + from + " " + System.nanoTime());
            System.out.flush();
            if (lease != null) {
                semaphore.returnLease(lease);
            } else {
                mutex.release();
            }
        }
        client.close();
        System.out.println("done");
    }
}
