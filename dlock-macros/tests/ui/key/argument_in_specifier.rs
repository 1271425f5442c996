use dlock::key;

fn main() {
    let (n, width, x) = (7, 5, 1.5);
    let _ = key!("order:{n:width$}");
    let _ = key!("order:{x:.*}");
}
