package mlx5

// options are the library's environment switches that this driver honours too.
type options struct {
	CQESize             int  // MLX5_CQE_SIZE: 64 or 128
	NoBlueFlame         bool // MLX5_SHUT_UP_BF=1: doorbells only, on uncached pages
	BlueFlameInlineOnly bool // MLX5_POST_SEND_PREFER_BF=0: copy descriptors only when they carry inline data
	NoScatterCQE        bool // MLX5_SCATTER_TO_CQE=0: never payload in completion entries
}

func optionsFromEnv(getenv func(string) string) options {
	o := options{CQESize: 64}
	if getenv("MLX5_CQE_SIZE") == "128" {
		o.CQESize = 128
	}
	o.NoBlueFlame = getenv("MLX5_SHUT_UP_BF") == "1"
	o.BlueFlameInlineOnly = getenv("MLX5_POST_SEND_PREFER_BF") == "0"
	o.NoScatterCQE = getenv("MLX5_SCATTER_TO_CQE") == "0"
	return o
}
