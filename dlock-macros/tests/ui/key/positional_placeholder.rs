use dlock::key;

fn main() {
    let _ = key!("order:{}");
    let _ = key!("order:{0}");
}
